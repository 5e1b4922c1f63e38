"""Agents whose loop is outside: a function in a process beside the stage, a command for each episode, or a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from agent_r1.params.env import AgentParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One episode, as an agent outside sees it."""

    question_id: str
    text: str
    setup: Mapping[str, Any]
    strata: Mapping[str, str]
    base_url: str  # of the gateway, for a client
    key: str  # of the episode's session, for a client
    reward_key: str  # for a reward, which the policy must not learn
    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """What came of an episode."""

    answer: str | None = None
    success: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # of the reward, by name
    fault: str = ""  # "" if it ended well; else what happened, with the last lines it wrote


class Programs:
    """All agents of a stage. Ends every process when it is left, and when the stage is killed."""

    def __init__(self, agents: Mapping[str, AgentParams], concurrency: int, folder: Path) -> None:
        """At most `concurrency` episodes run at a time; `folder` is for theirs alone, and goes with them."""
        self._agents, self._concurrency, self._folder = agents, concurrency, folder

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *fault: object) -> None:
        pass

    async def play(self, agent: str, task: Task) -> Ending:
        """Runs one episode to its end."""
        raise NotImplementedError
