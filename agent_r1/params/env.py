"""`env`: the tools, games and contexts that training and evaluation share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from agent_r1.params.sections import Count, Name, Natural, Positive, Section, Share, address
from agent_r1.params.worlds import OutsideParams


class SearchToolParams(Section):
    """`env.top_k` says how many passages a search shows, to `naive_rag` too."""


class CalculatorParams(Section):
    """Without a setting."""


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

    def objections(self) -> Iterator[str]:
        if (self.command is None) == (self.url is None):
            yield "a server is a command that is started or the url of one that runs; give one of the two"
        if self.environment and self.url:
            yield "environment has no effect with url; leave it out"


class FunctionParams(Section):
    """A function of one's own, under its name: what a module of the operator's has."""

    module: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
    timeout_s: Positive | None = None  # of one call, of an `async def`


def _without_null(entries: object) -> object:
    return (
        {name: entry for name, entry in entries.items() if entry is not None} if isinstance(entries, dict) else entries
    )


class ToolsParams(Section):
    """What a question is answered with; null leaves a tool out, a function or a server of the base from a run too."""

    search: SearchToolParams | None
    calculator: CalculatorParams | None
    read: ReadParams | None
    python: PythonParams | None
    functions: Annotated[dict[str, FunctionParams], BeforeValidator(_without_null)]
    mcp: Annotated[dict[Name, McpParams], BeforeValidator(_without_null)]

    def objections(self) -> Iterator[str]:
        built_in = (self.search, self.calculator, self.read, self.python)
        if all(tool is None for tool in built_in) and not self.functions and not self.mcp:
            yield "a question cannot be answered without any tool; offer one, such as search: {}"


# When the requests of episodes leave for the engine; see `agent_r1.rollout.episodes`.
Order = Literal[
    "rounds",  # when every episode that lives has asked
    "arrival",  # as soon as its episode has it
    "exact_arrival",  # so too, and a training is refused unless an action is then shown to be the same in any company
]


class GamesParams(Section):
    """How the games of `agent_r1.games` are played; see `agent_r1.envs.game_env`."""

    protocol: Literal["ragen_v1", "ragen_v2", "brief"]
    moves_per_step: Count
    moves: Count

    def objections(self) -> Iterator[str]:
        if self.moves_per_step > self.moves:
            yield (
                f"moves_per_step {self.moves_per_step} has no effect above moves {self.moves}, which an episode has in "
                "all; lower it, or raise moves"
            )


class ContextParams(Section):
    """What the policy reads of an episode that goes on; see `agent_r1.rollout.episode`."""

    kind: Literal["append", "window", "summary"]
    every: Natural

    def objections(self) -> Iterator[str]:
        if (self.kind == "append") != (self.every == 0):
            yield (
                f"every {self.every} does not go with kind: {self.kind}; it is 0 with append, which keeps everything, "
                "and with the others the exchanges of a window or the steps between two summaries"
            )


class EnvParams(OutsideParams):
    instructions: str
    tools: ToolsParams
    max_result_characters: Count
    top_k: Count
    max_steps: Count
    max_tokens: Count
    max_action_tokens: Count
    context: ContextParams
    parallel_calls: Count
    aborted_share: Share
    order: Order
    games: GamesParams

    def objections(self) -> Iterator[str]:
        if self.max_action_tokens >= self.max_tokens:
            yield (
                f"max_action_tokens {self.max_action_tokens} leaves no room for a prompt in "
                f"max_tokens {self.max_tokens}; raise max_tokens"
            )
        steps = self.max_steps - (2 if self.context.kind == "window" else 1)  # the last of which a rewriting can follow
        if self.context.every > steps:
            yield (
                f"context.every {self.context.every} has no effect with kind: {self.context.kind} and max_steps "
                f"{self.max_steps}, which end an episode before its context is rewritten; lower it, or raise max_steps"
            )
        if self.tools.read and self.tools.read.part_characters >= self.max_result_characters:
            yield (
                f"tools.read.part_characters {self.tools.read.part_characters} would be cut at max_result_characters "
                f"{self.max_result_characters}; make parts smaller"
            )
