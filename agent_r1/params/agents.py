"""`env.agents`: agents whose loop is outside."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from agent_r1.harmless import without_password
from agent_r1.params.sections import (
    LOOPBACK,
    Count,
    Names,
    Needs,
    Positive,
    Refusals,
    Section,
    Variable,
    address,
    repeated,
)

_FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


def _here(url: str) -> str:
    """The address of a service on this machine; others cannot reach the gateway, and a ValueError refuses them."""
    service = address(url)
    if urlsplit(service).hostname not in LOOPBACK:
        raise ValueError(f"{without_password(url)!r} is on another machine, and the gateway listens on this one alone")
    return service


class AgentParams(Section):
    """An agent whose loop is outside: a function, a command or a service; see `agent_r1.agents.programs`."""

    needs = (Needs("environment", [], "url", (None,), ", which starts no process"),)

    function: Annotated[str, Field(pattern=_FUNCTION)] | None = None  # `module:name`
    python: str | None = None  # the interpreter that imports the function; null is the stage's
    command: Names | None = None  # started for each episode
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

    def refusals(self) -> Refusals:
        if sum(form is not None for form in (self.function, self.command, self.url)) != 1:
            yield "an agent is a function, a command that is started or the url of a service; give one of the three"
        if self.python and not self.function:
            yield f"python: {self.python!r} has no effect without a function, which it would import; leave it out"
        if (self.url is None) != (not self.version):
            yield f"version is {self.version!r}, and a service has one that changes with it, others none; see to that"
        yield from repeated(rewards=self.rewards)
