"""Worlds that others wrote: how `env` declares them, and how `prepare.worlds` draws their starts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from agent_r1.params.sections import Name, Needs, Positive, Refusals, Section, address
from agent_r1.params.worlds import WorldSeeds

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

    def refusals(self) -> Refusals:
        mode = self.kwargs.get("render_mode", "ansi")
        if mode != "ansi":
            yield f"kwargs.render_mode {mode!r} draws no text; set it to ansi, or leave it out to show what is observed"
        if self.observation and "render_mode" in self.kwargs:
            setting = f"observation {self.observation!r}"
            yield f"{setting} has no effect where kwargs.render_mode draws; leave out one of the two"
        [(name, times)] = Counter(action.casefold() for action in self.actions or ["any"]).most_common(1)
        if times > 1:
            yield f"actions names {name!r} {times} times, in whatever case; give every move a name of its own"


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


class OthersWorlds(Section):
    """What `env` says of the worlds that others wrote, by their kinds."""

    gymnasium: dict[Name, GymnasiumParams] = Field(default={})
    openenv: dict[Name, OpenEnvParams] = Field(default={})
    toolbox: dict[Name, ToolboxParams] = Field(default={})

    @property
    def declared(self) -> dict[str, list[str]]:
        """The names of each kind."""
        return {kind: [*vars(self)[kind]] for kind in OthersWorlds.model_fields}


class OthersParams(WorldSeeds):
    """An environment that others wrote, or an agent outside, which `env` declares under a name."""

    needs = (
        Needs("reset", None, "env", ("openenv",), ", whose rows hold a seed, or a row"),
        Needs("row", None, "env", ("toolbox",), ", whose rows hold a seed, or a reset"),
        Needs("file", None, "env", ("openenv", "toolbox", "agent"), ", whose rows hold a seed"),
    )

    env: Literal["gymnasium", "openenv", "toolbox", "agent"]
    name: str
    reset: dict[str, Any] | None = None  # of openenv, arguments in which {seed}, {index} and {split} are the row's own
    row: dict[str, Any] | None = None  # of toolbox, the same
    file: Path | None = None  # of these and of an agent, rows of further arguments; seeds are their numbers, from 0
