"""`env.tools`: what a question is answered with, of this project, of servers and of one's own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from agent_r1.params.sections import Count, Name, Names, Needs, Positive, Refusals, Section, Variable, address


class NoSettings(Section):
    """A tool that is offered as it is."""


class ReadParams(Section):
    part_characters: Annotated[int, Field(ge=100)]


class PythonParams(Section):
    """The sandbox of `agent_r1.outside.sandbox`."""

    timeout_s: Positive
    memory_mib: Annotated[int, Field(ge=16)]
    workers: Count


class McpParams(Section):
    """A server that speaks the Model Context Protocol: a command that is started, or an address."""

    needs = (Needs("environment", [], "url", (None,), ", which starts no process"),)

    command: Names | None = None
    url: Annotated[str, AfterValidator(address)] | None = None
    timeout_s: Positive  # of one call
    scope: Literal["stage", "episode"] = "stage"  # who shares a session with it: all episodes of a stage, or none
    tools: Names | None = None  # of those it has; all where left out
    environment: list[Variable] = Field(default=[])  # what a command is given of the stage's own

    def refusals(self) -> Refusals:
        if (self.command is None) == (self.url is None):
            yield "a server is a command that is started or the url of one that runs; give one of the two"


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

    def refusals(self) -> Refusals:
        if all(tool in (None, {}) for tool in vars(self).values()):
            yield "a question cannot be answered without any tool; offer one, such as search: {}"
