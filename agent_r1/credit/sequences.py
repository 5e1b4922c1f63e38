"""Sums, statistics and steps along the tokens of a batch: what estimators are made of.

Legend for shapes: B = trajectories of a batch, L = tokens of the longest, N = selected tokens of all trajectories, one
after the other, S = sequences of such tokens, such as the steps.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit.batch import Batch, Floats, Mask
from agent_r1.params.credit import CreditParams

Counts = NDArray[np.int64]
WHITENING_EPSILON = 1e-8


def generalized_advantages(rewards: Floats, values: Floats, lengths: Counts, *, gamma: float, lam: float) -> Floats:
    """[N] A_n = delta_n + gamma lam A_{n+1}, delta_n = r_n + gamma V_{n+1} - V_n, V and A 0 after a sequence's end.

    Rewards [N] are received at each entry, values [N] are of the state before it; `lengths` [S] may be 0.

    Source: Schulman et al. 2016 (arXiv 1506.02438), Eq. 11 and 16.
    """
    next_values = np.append(values[1:], 0.0)
    next_values[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    return discounted_sums(rewards + gamma * next_values - values, lengths, gamma * lam)


def discounted_sums(entries: Floats, lengths: Counts, factor: float) -> Floats:
    """[N] S_n = x_n + factor S_{n+1} of entries x [N], S 0 after the end of a sequence; `lengths` [S] may be 0."""
    if lengths.sum() != len(entries):
        raise RuntimeError(f"{len(entries)} entries for sequences of {lengths.sum()} together")
    filled = np.arange(lengths.max(initial=0)) < lengths[:, None]  # [S, longest]
    sums = scatter(entries, filled).T.copy()  # [longest, S], in which a row is in one piece
    for later, earlier in pairwise(sums[::-1]):
        earlier += factor * later
    return sums.T[filled]


def whitened(advantages: Floats, batch: Batch, floor: float) -> Floats:
    """[B, L] the advantages whitened over the batch's whitening mask, exactly 0 outside its time steps."""
    return np.where(batch.time_steps, whiten(advantages, batch.whitening_mask, floor), 0.0)


def whiten(advantages: Floats, over: Mask, floor: float) -> Floats:
    """[B, L] all shifted and scaled by the same numbers, so that the tokens of `over` have mean 0, population std 1.

    A std below `floor` counts as the floor, so that what hardly differs is not scaled up to what differs.
    """
    counted = advantages[over]
    mean, std = float(counted.mean()), float(counted.std())
    return (advantages - mean) / (max(std, floor) + WHITENING_EPSILON)


def group_statistics(returns: Floats, groups: NDArray[np.int64]) -> tuple[Floats, Floats, Counts]:
    """[B] deviation from the group's mean, [B] the group's sample std (0 in a group of one), [B] the group's size."""
    _, first, group, counts = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    # Measured from a member of the group, so that equal returns deviate by exactly 0 and not by a rounding error.
    shifted = returns - returns[first][group]
    deviations = shifted - (np.bincount(group, weights=shifted) / counts)[group]
    variances = np.bincount(group, weights=deviations**2) / np.maximum(counts - 1, 1)
    return deviations, np.sqrt(variances)[group], counts[group]


class StepSpans(NamedTuple):
    """Where the steps of a batch are; S = its steps, one trajectory after the other, N = its action tokens."""

    acting: Mask  # [B, L] the action tokens
    first: Mask  # [B, L] the first token of every step
    starts: NDArray[np.intp]  # [S] which of the N action tokens begins the step
    tokens: Counts  # [S] tokens of each step
    per_trajectory: Counts  # [B] steps of each trajectory


def step_spans(steps: NDArray[np.int32]) -> StepSpans:
    """The spans of steps [B, L], given as in `Batch.steps`."""
    acting = steps >= 0
    first = acting.copy()
    first[:, 1:] &= steps[:, 1:] != steps[:, :-1]
    starts = np.flatnonzero(first[acting])
    tokens = np.diff(starts, append=np.count_nonzero(acting))
    return StepSpans(acting, first, starts, tokens, first.sum(axis=1))


def step_rewards(rewards: Floats, spans: StepSpans) -> Floats:
    """[S] a step's reward is the sum of its tokens' rewards."""
    summed: Floats = np.add.reduceat(rewards_at(rewards, spans.acting), spans.starts)
    return summed


def step_advantages(rewards: Floats, values: Floats, spans: StepSpans, params: CreditParams) -> Floats:
    """[S] the advantages of steps with values [S]."""
    received, steps = step_rewards(rewards, spans), spans.per_trajectory
    return generalized_advantages(received, values, steps, gamma=params.step_gamma, lam=params.step_lam)


def step_returns(rewards: Floats, spans: StepSpans, params: CreditParams) -> Floats:
    """[S] what a step and those after it earn, discounted per step."""
    return discounted_sums(step_rewards(rewards, spans), spans.per_trajectory, params.step_gamma)


def on_steps(advantages: Floats, spans: StepSpans) -> Floats:
    """[B, L] the advantage [S] of a step at each of its tokens."""
    return scatter(np.repeat(advantages, spans.tokens), spans.acting)


def token_advantages(rewards: Floats, values: Floats, time_steps: Mask, params: CreditParams) -> Floats:
    """[B, L] the generalised advantages of every trajectory's time steps; tokens between them get exactly 0."""
    received, lengths = rewards_at(rewards, time_steps), time_steps.sum(axis=1)
    flat = generalized_advantages(received, values[time_steps], lengths, gamma=params.gamma, lam=params.lam)
    return scatter(flat, time_steps)


def rewards_at(rewards: Floats, time_steps: Mask) -> Floats:
    """[N] of rewards [B, L] those at the time steps, where all of them must be."""
    if rewards[~time_steps].any():
        raise RuntimeError("a reward outside of the time steps would be lost")
    return rewards[time_steps]


def broadcast(advantages: Floats, batch: Batch) -> Floats:
    """[B, L] a trajectory's advantage [B] at each of its time steps, exactly 0 elsewhere."""
    return np.where(batch.time_steps, advantages[:, None], 0.0)


def scatter(entries: Floats, mask: Mask) -> Floats:
    """[B, L] the entries [N] at the N tokens of the mask, 0 elsewhere."""
    tokens = np.zeros(mask.shape)
    tokens[mask] = entries
    return tokens
