"""Estimators that compare the episodes of a group; each gives a trajectory one advantage, at all its time steps."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit.batch import Batch, Estimate, Floats, without_critic
from agent_r1.params import CreditParams

EPSILON = 1e-6  # DESIGN §6

Sizes = NDArray[np.int64]

logger = logging.getLogger(__name__)


def grpo(batch: Batch, params: CreditParams) -> Estimate:
    """(R - mean) / (std + 1e-6) within the group, sample std; 0 in a group of one.

    Source: Shao et al. 2024 (arXiv 2402.03300), §4.1.2.
    """
    deviations, stds, _ = compared(batch)
    return without_critic(broadcast(deviations / (stds + EPSILON), batch))


def dr_grpo(batch: Batch, params: CreditParams) -> Estimate:
    """R - mean within the group: questions that are easy or hard weigh no more than others. 0 in a group of one.

    Source: Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783), §3.2.
    """
    deviations, _, _ = compared(batch)
    return without_critic(broadcast(deviations, batch))


def rloo(batch: Batch, params: CreditParams) -> Estimate:
    """R minus the mean of the group's others, which is n / (n - 1) (R - mean) in a group of n; 0 in a group of one.

    Source: Kool et al. 2019; Ahmadian et al. 2024 (arXiv 2402.14740), Eq. 9.
    """
    deviations, _, sizes = compared(batch)
    return without_critic(broadcast(deviations * sizes / np.maximum(sizes - 1, 1), batch))


def broadcast(advantages: Floats, batch: Batch) -> Floats:
    """[B, L] a trajectory's advantage [B] at each of its time steps, exactly 0 elsewhere."""
    return np.where(batch.time_steps, advantages[:, None], 0.0)


def compared(batch: Batch) -> tuple[Floats, Floats, Sizes]:
    """The `group_statistics` of the batch's returns, with a warning of trajectories that are alone in their group."""
    deviations, stds, sizes = group_statistics(batch.rewards.sum(axis=1), batch.groups)
    alone = np.count_nonzero(sizes == 1)
    if alone:
        logger.warning("%d of %d trajectories are alone in their group: their advantage is 0", alone, len(sizes))
    return deviations, stds, sizes


def group_statistics(returns: Floats, groups: NDArray[np.int64]) -> tuple[Floats, Floats, Sizes]:
    """[B] deviation from the group's mean, [B] the group's sample std (0 in a group of one), [B] the group's size."""
    _, first, group, counts = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    # Measured from a member of the group, so that equal returns deviate by exactly 0 and not by a rounding error.
    shifted = returns - returns[first][group]
    deviations = shifted - (np.bincount(group, weights=shifted) / counts)[group]
    variances = np.bincount(group, weights=deviations**2) / np.maximum(counts - 1, 1)
    return deviations, np.sqrt(variances)[group], counts[group]
