"""`env`: the tools, games, contexts and others' environments that training and evaluation share."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from agent_r1.harmless import without_password
from agent_r1.params.sections import LOOPBACK, Count, Name, Natural, Positive, Section, Share, address


class NoSettings(Section):
    """A tool that is offered as it is."""


class ReadParams(Section):
    part_characters: Annotated[int, Field(ge=100)]


class PythonParams(Section):
    """The sandbox of `agent_r1.outside.sandbox`."""

    timeout_s: Positive
    memory_mib: Annotated[int, Field(ge=16)]
    workers: Count


Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class McpParams(Section):
    """A server that speaks the Model Context Protocol: a command that is started, or an address."""

    command: Annotated[list[str], Field(min_length=1)] | None = None
    url: Annotated[str, AfterValidator(address)] | None = None
    timeout_s: Positive  # of one call
    scope: Literal["stage", "episode"] = "stage"  # who shares a session with it: all episodes of a stage, or none
    tools: Annotated[list[str], Field(min_length=1)] | None = None  # of those it has; all where left out
    environment: list[Variable] = Field(default=[])  # what a command is given of the stage's own


class FunctionParams(Section):
    """An own function, which its module has under the name of the tool."""

    module: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
    timeout_s: Positive | None = None  # of one call, of an `async def`


def _without_null(entries: object) -> object:
    return (
        {name: entry for name, entry in entries.items() if entry is not None} if isinstance(entries, dict) else entries
    )


class ToolsParams(Section):
    """The tools that a question is answered with; null takes one away, in a run a function or a server too."""

    search: NoSettings | None = None  # `env.top_k` says how many passages it shows, to `naive_rag` too
    calculator: NoSettings | None = None
    read: ReadParams | None = None
    python: PythonParams | None = None
    functions: Annotated[dict[str, FunctionParams], BeforeValidator(_without_null)] = Field(default={})
    mcp: Annotated[dict[Name, McpParams], BeforeValidator(_without_null)] = Field(default={})


# When the requests of episodes leave for the engine; see `agent_r1.rollout.episodes`.
Order = Literal[
    "rounds",  # when every episode that lives has asked
    "arrival",  # as soon as its episode has it
    "exact_arrival",  # so too, and a training is refused unless an action is then shown to be the same in any company
]


# The texts that are answers.
Answers = Literal[
    "tagged",  # between <answer> and </answer>
    "plain",  # also a whole action without a tool call
]


# The texts that are calls.
Calls = Literal[
    "strict",  # in the form of the chat template or of Hermes
    "lenient",  # also bare or fenced JSON, a list, `parameters`, no arguments, no closing mark; see `rollout.calls`
]


class GamesParams(Section):
    """How the games of `agent_r1.games` are played; see `agent_r1.envs.game_env`."""

    protocol: Literal["ragen_v1", "ragen_v2", "brief"]
    moves_per_step: Count
    moves: Count


class ContextParams(Section):
    """The part of an episode that the policy reads; see `agent_r1.rollout.episode`."""

    kind: Literal["append", "window", "summary"]
    every: Natural


Reward = Annotated[float, Field(allow_inf_nan=False)]
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_WORDS = r"^\S(.*\S)?$"
SUCCESSES = "info, terminated, truncated, {last_reward: R} or {return: R}"


def _one_of_them(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError:
        raise ValueError(f"success is {SUCCESSES}, and R is a number") from None


# A play must show one thing to be a success; see `agent_r1.outside.gym_env`.
Success = Annotated[
    Literal["info", "terminated", "truncated"]
    | Annotated[dict[Literal["last_reward", "return"], Reward], Field(min_length=1, max_length=1)],
    WrapValidator(_one_of_them),
]


def _web(url: str) -> str:
    """A server's address as that of a page; its WebSocket has the same with ws in place of http."""
    return address(f"http{url[2:]}" if url.startswith(("ws://", "wss://")) else url).removesuffix("/ws")


class _WorldParams(Section):
    task: str = ""  # what the policy is told to do, in place of the question's text


class GymnasiumParams(_WorldParams):
    """An environment of gymnasium's, or one that is registered with it; see `agent_r1.outside.gym_env`."""

    id: Annotated[str, Field(pattern=rf"^({_MODULE}:)?([\w-]+/)?[\w.-]+$")]
    success: Success | None = None  # null is info, and refused where the world's info has no success
    kwargs: dict[str, Any] = Field(default={})
    observation: str = ""  # the key of its observations that is shown, or `module:name`, a function of them; "" is all
    # What its moves are called, from the first on; null where it takes text.
    actions: Annotated[list[Annotated[str, Field(pattern=_WORDS)]], Field(min_length=1)] | None = None


class OpenEnvParams(_WorldParams):
    """A server of OpenEnv's; see `agent_r1.outside.openenv`."""

    url: Annotated[str, AfterValidator(_web)]
    action: str | None = None  # the field of its action that takes what the policy writes; null calls its tools
    observation: str | None = None  # the field of its observation that the policy reads; null shows all
    timeout_s: Positive  # of one answer
    success_above: Reward = 0.0  # the reward of the last step, beyond which it is a success


class ToolboxParams(_WorldParams):
    """A class whose public methods are tools, as TRL's environments are; see `agent_r1.outside.toolbox_env`."""

    model_config = ConfigDict(serialize_by_alias=True)

    class_: Annotated[str, Field(alias="class", pattern=rf"^{_MODULE}:[A-Za-z_]\w*$")]
    timeout_s: Positive | None = None  # of one call of an `async def`
    success_above: Reward = 0.0  # its reward, beyond which it is a success


def _here(url: str) -> str:
    """The address of a service on this machine; others cannot reach the gateway, and a ValueError refuses them."""
    service = address(url)
    if urlsplit(service).hostname not in LOOPBACK:
        raise ValueError(f"{without_password(url)!r} is on another machine, and the gateway listens on this one alone")
    return service


class AgentParams(Section):
    """An agent whose loop is outside: a function, a command or a service; see `agent_r1.agents.programs`."""

    function: Annotated[str, Field(pattern=rf"^{_MODULE}:[A-Za-z_]\w*$")] | None = None  # `module:name`
    command: Annotated[list[str], Field(min_length=1)] | None = None  # started for each episode
    url: Annotated[str, AfterValidator(_here)] | None = None  # of a service on this machine
    version: str = ""  # of a service: another one is another agent
    timeout_s: Positive  # of an episode, with the time in which the policy samples
    environment: list[Variable] = Field(default=[])  # variables of the stage's that its process is given; no others
    rewards: list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,99}$")]] = Field(default=[])  # parts that it may state
    concurrency: Count = 64  # episodes at a time
    parallel: bool = False  # requests of one episode at the same time; else a second one waits
    repeats: bool = True  # whether its own tools answer the same again; runs of others are not reproducible
    history: Literal["sampled", "sent"] = "sampled"  # thoughts that it does not send back: still read, or not
    examples: bool = False  # whether `env.examples` stand before its own messages


class EnvParams(Section):
    agents: dict[Name, AgentParams] = Field(default={})
    agent: Name | None = None  # of `agents`, the one that answers questions; null is the loop of this project
    gymnasium: dict[Name, GymnasiumParams] = Field(default={})
    openenv: dict[Name, OpenEnvParams] = Field(default={})
    toolbox: dict[Name, ToolboxParams] = Field(default={})
    instructions: str
    examples: str  # a file of conversations that open every context; "" for none
    answers: Answers
    tools: ToolsParams
    max_result_characters: Count
    top_k: Count
    max_steps: Count
    max_tokens: Count
    max_action_tokens: Count
    context: ContextParams
    parallel_calls: Count
    calls: Calls
    aborted_share: Share
    too_long_share: Share
    order: Order
    games: GamesParams

    @property
    def declared(self) -> dict[str, list[str]]:
        """The names of each kind."""
        return {"gymnasium": [*self.gymnasium], "openenv": [*self.openenv], "toolbox": [*self.toolbox]}
