"""Advantage estimators: pure functions over a batch, vectorised over its trajectories.

Legend for shapes: B = trajectories of the batch, L = tokens of the longest, padded on the right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit.masks import Mask
from agent_r1.params import CreditParams

Floats = NDArray[np.float64]

WHITENING_EPSILON = 1e-8
GROUP_EPSILON = 1e-6  # DESIGN §6

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Trajectories side by side; padding is 0 everywhere. The masks are chosen by `agent_r1.credit.masks`."""

    rewards: Floats  # [B, L] a step's reward at its last action token, 0 elsewhere
    values: Floats | None  # [B, L] the critic's; None without a critic
    time_steps: Mask  # [B, L] tokens of the advantage recursion; every reward is on one
    whitening_mask: Mask  # [B, L] tokens that the whitening statistics are taken over
    critic_mask: Mask  # [B, L] tokens the critic is trained at
    groups: NDArray[np.int64]  # [B] the group of each trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What an estimator makes of a batch."""

    advantages: Floats  # [B, L] exactly 0 outside the time steps
    value_targets: Floats  # [B, L] exactly 0 outside the critic mask


def gae(batch: Batch, params: CreditParams) -> Estimate:
    """Generalised advantage estimation (Schulman et al. 2016) over tokens, then whitening over the batch.

    Value targets are A + V with the advantages before whitening. Where the critic is trained at tokens that are
    no time steps (recursion on, critic off), the targets there come from the recursion over the critic's tokens.

    Raises:
        ValueError: the batch has no values.
    """
    if batch.values is None:
        raise ValueError("estimator gae needs the values of a critic; give them, or set estimator: grpo")
    raw = generalized_advantages(batch.rewards, batch.values, batch.time_steps, gamma=params.gamma, lam=params.lam)
    beyond = batch.critic_mask & ~batch.time_steps
    targets = raw + batch.values
    if beyond.any():
        everywhere = generalized_advantages(
            batch.rewards, batch.values, batch.critic_mask, gamma=params.gamma, lam=params.lam
        )
        targets = np.where(beyond, everywhere + batch.values, targets)
    return Estimate(
        advantages=np.where(batch.time_steps, whiten(raw, batch.whitening_mask), 0.0),
        value_targets=np.where(batch.critic_mask, targets, 0.0),
    )


def grpo(batch: Batch, params: CreditParams) -> Estimate:
    """Group-relative advantages (Shao et al. 2024), the same at every time step of a trajectory.

    Raises:
        ValueError: the batch has values, which this estimator would not look at.
    """
    if batch.values is not None:
        raise ValueError("estimator grpo uses no values; give none, or set estimator: gae")
    advantages = group_advantages(batch.rewards.sum(axis=1), batch.groups)
    return Estimate(
        advantages=np.where(batch.time_steps, advantages[:, None], 0.0),
        value_targets=np.zeros_like(batch.rewards),
    )


ESTIMATORS: dict[str, Callable[[Batch, CreditParams], Estimate]] = {"gae": gae, "grpo": grpo}


def generalized_advantages(rewards: Floats, values: Floats, time_steps: Mask, *, gamma: float, lam: float) -> Floats:
    """[B, L] A_n = delta_n + gamma lam A_{n+1}, delta_n = r_n + gamma V_{n+1} - V_n, V_{N+1} = A_{N+1} = 0.

    n counts the time steps of each trajectory; tokens between them are passed over and get exactly 0.
    """
    assert not rewards[~time_steps].any(), "a reward outside the time steps would be lost"
    advantages = np.zeros_like(rewards)
    next_value = np.zeros(len(rewards))
    next_advantage = np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = time_steps[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = np.where(here, delta + gamma * lam * next_advantage, 0.0)
        next_advantage = np.where(here, advantages[:, t], next_advantage)
        next_value = np.where(here, values[:, t], next_value)
    return advantages


def whiten(advantages: Floats, over: Mask) -> Floats:
    """[B, L] shifted and scaled so that the tokens of `over` have mean 0 and (population) std 1.

    Tokens outside `over` are shifted and scaled by the same numbers.
    """
    counted = advantages[over]
    mean, std = float(counted.mean()), float(counted.std())
    return (advantages - mean) / (std + WHITENING_EPSILON)


def group_advantages(returns: Floats, groups: NDArray[np.int64]) -> Floats:
    """[B] (R - mean) / (std + 1e-6) within each group, sample std; 0 in a group of one, with a warning."""
    deviations, stds, sizes = group_statistics(returns, groups)
    alone = int((sizes == 1).sum())
    if alone:
        logger.warning("%d of %d trajectories are alone in their group: their advantage is 0", alone, len(returns))
    return deviations / (stds + GROUP_EPSILON)


def group_statistics(returns: Floats, groups: NDArray[np.int64]) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """[B] deviation from the group's mean, [B] the group's sample std (0 in a group of one), [B] the group's size."""
    _, first, group, counts = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    # Measured from a member of the group, so that equal returns deviate by exactly 0 and not by a rounding error.
    shifted = returns - returns[first][group]
    deviations = shifted - (np.bincount(group, weights=shifted) / counts)[group]
    variances = np.bincount(group, weights=deviations**2) / np.maximum(counts - 1, 1)
    return deviations, np.sqrt(variances)[group], counts[group]
