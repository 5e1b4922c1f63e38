"""What the page shows: trajectories with all that is known about them.

Legend for shapes: L = tokens of a trajectory, K = its steps.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_r1.answers import exact_match
from agent_r1.records import Credit, Question, Trajectory

Decode = Callable[[Sequence[int]], str]  # token ids -> text, special tokens included, nothing cleaned up


class When(enum.StrEnum):
    """When in the life of a policy it acted."""

    BEFORE = "before"  # the untrained policy, on a test question
    TRAINING = "training"
    AFTER = "after"  # the trained policy, on a test question


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One trajectory of the page."""

    when: When
    question: Question
    trajectory: Trajectory
    totals: NDArray[np.float64]  # [K] the step's reward, weighted
    parts: Mapping[str, NDArray[np.float64]]  # name -> [K], unweighted
    credit: Credit | None = None  # None outside of training
    learner_logprobs: NDArray[np.float32] | None = None  # [L] nats; None where the learner was not asked

    @property
    def right(self) -> bool:
        """Whether the answer is an exact match."""
        return bool(exact_match(self.trajectory.answer, self.question.answers))
