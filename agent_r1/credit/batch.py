"""What an estimator is given and what it gives back.

Legend for shapes: B = trajectories of the batch, L = tokens of the longest, padded on the right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit.masks import Mask

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Trajectories side by side; padding is in no mask and no step. `agent_r1.credit.masks` chooses the masks."""

    rewards: Floats  # [B, L] a step's reward at its last action token, 0 elsewhere
    values: Floats | None  # [B, L] the critic's of the state before each token; None without a critic
    steps: NDArray[np.int32]  # [B, L] the index of the step that an action token belongs to, -1 elsewhere
    time_steps: Mask  # [B, L] tokens of the advantage recursion; every reward is on one
    whitening_mask: Mask  # [B, L] tokens that the whitening statistics are taken over
    critic_mask: Mask  # [B, L] tokens a critic of tokens is trained at
    groups: NDArray[np.int64]  # [B] the group of each trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What an estimator makes of a batch."""

    advantages: Floats  # [B, L] exactly 0 outside the time steps
    value_targets: Floats  # [B, L] exactly 0 outside the critic mask
    critic_mask: Mask  # [B, L] tokens this estimator's critic is trained at; none without a critic


def without_critic(advantages: Floats) -> Estimate:
    """The estimate of an estimator that trains no critic."""
    return Estimate(
        advantages=advantages,
        value_targets=np.zeros_like(advantages),
        critic_mask=np.zeros(advantages.shape, dtype=np.bool_),
    )
