"""What a sampler is: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agent_r1.records import StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One action to sample."""

    episode: int  # index of the episode within the collection
    step: int  # index of the action within the episode
    context: list[int]  # all token ids the policy sees
    seed: int  # derived from (seed, iteration, question, sample, step)
    max_tokens: int  # at least 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One action, exactly as sampled; ends with the end-of-message token where stop_reason is END."""

    token_ids: list[int]  # [A]
    logprobs: NDArray[np.float32]  # [A] nats
    stop_reason: StopReason


class Sampler(Protocol):
    """Something that acts: an engine, or a demonstrator with a script."""

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """One action per request, in their order."""
        ...
