"""What an environment is: the other side of an episode. It sees and says text; tokens are the rollout's business."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from agent_r1.records import CallStatus, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """What one action led to."""

    observation: str | None  # the text that comes back; None ends the episode
    outcome: Outcome | None = None  # set where observation is None
    answer: str = ""  # the text between the answer tags
    tool: str = ""
    arguments: str = ""  # JSON
    call_status: CallStatus = CallStatus.NONE
    latency_s: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)  # named parts, unweighted
    rewards_when_read: dict[str, float] = field(default_factory=dict)  # further ones, if the observation finds room

    def __post_init__(self) -> None:
        assert (self.observation is None) == (self.outcome is not None), "an episode ends with an outcome"
        assert self.observation is not None or not self.rewards_when_read, "nothing is read after the end"


class Env(Protocol):
    """One episode's environment: made for one question, used once."""

    system: str  # the opening system message
    user: str  # the opening user message
    tools: list[dict[str, Any]]  # JSON schemas in the OpenAI function form, for the chat template

    def step(self, action: str) -> Transition:
        """Takes the decoded action and answers it.

        It holds special tokens, but not the end token that closed it; where the prompt ends in `<think>`, it opens so.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """An episode to be run."""

    question_id: str
    group: int  # index of the question within the iteration
    sample: int  # index of the episode within its group
    env: Env
