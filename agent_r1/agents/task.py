"""One episode of an agent outside: what it is told, and what comes of it. Imports little."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One episode, as an agent sees it."""

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
    """The end of an episode, as its program states it."""

    answer: str | None = None
    success: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # of the reward, by name
    fault: str = ""  # "" if it ended well; else what happened, and below it the program's last words
