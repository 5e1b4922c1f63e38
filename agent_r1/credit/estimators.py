"""The advantage estimators: with a critic, within groups, and REINFORCE++.

Legend for shapes: B = trajectories of a batch, L = tokens of the longest, N = selected tokens of all trajectories, one
after the other, S = sequences of such tokens, such as the steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from agent_r1.credit.batch import Batch, Floats, Mask
from agent_r1.params.credit import CreditParams

Counts = NDArray[np.int64]

WHITENING_EPSILON = 1e-8
GROUP_EPSILON = 1e-6  # DESIGN §6

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What an estimator makes of a batch."""

    advantages: Floats  # [B, L] exactly 0 outside the time steps
    value_targets: Floats  # [B, L] exactly 0 outside the critic mask
    critic_mask: Mask  # [B, L] tokens this estimator's critic is trained at; none without a critic


def gae(batch: Batch, params: CreditParams) -> Estimate:
    """Generalised advantage estimation over tokens (`gamma`, `lam`), then whitening over the batch.

    Value targets are A + V with the advantages before whitening, and with `target_lam` in place of `lam` where it is
    given. Where the critic is trained at tokens that are no time steps (recursion on, critic off), the targets there
    come from the recursion over the critic's tokens.

    Source: Schulman et al. 2016 (arXiv 1506.02438); over action tokens alone: Agent-R1 (arXiv 2511.14460), §4; two
    lambdas: the decoupled GAE of VC-PPO (arXiv 2503.01491).
    """
    values = _critic_values(batch, params)
    raw = token_advantages(batch.rewards, values, batch.time_steps, params)
    targets = token_advantages(batch.rewards, values, batch.time_steps, params.of_targets) + values
    beyond = batch.critic_mask & ~batch.time_steps
    if beyond.any():
        over_critic = token_advantages(batch.rewards, values, batch.critic_mask, params.of_targets)
        targets = np.where(beyond, over_critic + values, targets)
    return Estimate(
        advantages=whitened(raw, batch, params.whitening_floor),
        value_targets=np.where(batch.critic_mask, targets, 0.0),
        critic_mask=batch.critic_mask,
    )


def step_gae(batch: Batch, params: CreditParams) -> Estimate:
    """Generalised advantage estimation over steps (`step_gamma`, `step_lam`), the same at every token of a step.

    A step's value is that of the state before acting, at the step's first token. It is asked for nowhere else, so the
    critic is trained there alone, towards A + V, with `target_lam` in place of `step_lam` where it is given. Whitening
    counts tokens, as the loss does: a long step weighs more.

    Source: StepPO (arXiv 2604.18401), whose whitening counts steps.
    """
    spans = step_spans(batch.steps)
    values = _critic_values(batch, params)[spans.first]
    raw = _step_advantages(batch.rewards, values, spans, params)
    targets = _step_advantages(batch.rewards, values, spans, params.of_targets) + values
    return Estimate(
        advantages=whitened(_on_steps(raw, spans), batch, params.whitening_floor),
        value_targets=_scatter(targets, spans.first),
        critic_mask=spans.first,
    )


def bi_level_gae(batch: Batch, params: CreditParams) -> Estimate:
    """Generalised advantage estimation over steps, and inside every step over its tokens.

    1. Over steps (`step_gamma`, `step_lam`), with the value at a step's last token: its advantage A and return A + V.
    2. Over the tokens of each step alone (`gamma`, `lam`), with that return as the reward of its last token, whose
       advantage is thereby the step's.

    The critic is trained at every action token, towards the second level's A + V, with `target_lam` in place of both
    lambdas where it is given. Steps are told apart by their index; where a reward of 0 or an action right after another
    hides the boundary, it is a boundary all the same.

    Source: VAGEN (arXiv 2510.16907), Bi-Level GAE; RAGEN, ragen/trainer/core_algos.py, which takes the tokens with a
    reward for the boundaries.
    """
    spans = step_spans(batch.steps)
    values = _critic_values(batch, params)[spans.acting]
    raw = _two_levels(batch.rewards, values, spans, params)
    targets = _two_levels(batch.rewards, values, spans, params.of_targets) + values
    return Estimate(
        advantages=whitened(_scatter(raw, spans.acting), batch, params.whitening_floor),
        value_targets=_scatter(targets, spans.acting),
        critic_mask=spans.acting,
    )


def _two_levels(rewards: Floats, values: Floats, spans: StepSpans, params: CreditParams) -> Floats:
    """[N] the advantages of action tokens with values [N], over steps and then over the tokens of each."""
    ends = spans.starts + spans.tokens - 1
    returns = np.zeros(len(values))
    returns[ends] = _step_advantages(rewards, values[ends], spans, params) + values[ends]
    return generalized_advantages(returns, values, spans.tokens, gamma=params.gamma, lam=params.lam)


def grpo(batch: Batch, params: CreditParams) -> Estimate:
    """(R - mean) / (std + 1e-6) within the group, sample std; 0 in a group of one.

    Source: Shao et al. 2024 (arXiv 2402.03300), §4.1.2.
    """
    deviations, stds, _ = _compare_returns(batch)
    return without_critic(broadcast(deviations / (stds + GROUP_EPSILON), batch))


def dr_grpo(batch: Batch, params: CreditParams) -> Estimate:
    """R - mean within the group: questions that are easy or hard weigh no more than others. 0 in a group of one.

    Source: Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783), §3.2.
    """
    return without_critic(broadcast(_compare_returns(batch)[0], batch))


def rloo(batch: Batch, params: CreditParams) -> Estimate:
    """R minus the mean of the group's others, which is n / (n - 1) (R - mean) in a group of n; 0 in a group of one.

    Source: Kool et al. 2019; Ahmadian et al. 2024 (arXiv 2402.14740), Eq. 9.
    """
    deviations, _, sizes = _compare_returns(batch)
    return without_critic(broadcast(deviations * sizes / np.maximum(sizes - 1, 1), batch))


def step_return(batch: Batch, params: CreditParams) -> Estimate:
    """The step's return to go minus its mean over those of the group that have a step of this index.

    The return to go is discounted by `step_gamma` per step, so a step is not credited with what was earned before it.
    The mean stands for the value of having come so far; who has taken this many steps does not depend on the action of
    this one, as a baseline must not. A step that no other trajectory of the group has gets 0.

    Source: returns to go of turns as advantages: GTPO (arXiv 2511.14846); a baseline per time step: Greensmith et al.
    2004 (JMLR 5); no std: Dr. GRPO (arXiv 2503.20783), §3.2.
    """
    _warn_of_groups_of_one(batch)
    spans = step_spans(batch.steps)
    of_this_index = _within_groups(batch, spans, batch.steps[spans.first].astype(np.int64))
    deviations, _, _ = group_statistics(_step_returns(batch.rewards, spans, params), of_this_index)
    return without_critic(_on_steps(deviations, spans))


def gigpo(batch: Batch, params: CreditParams) -> Estimate:
    """The episode against its group, plus `gigpo.weight` times the step against the group's steps in the same state.

    The first compares returns, as `dr_grpo` does, the second returns to go (`step_gamma` per step). With `gigpo.std`
    each is divided by the sample std of those that it is compared with, as in `grpo`. A step whose state occurs once in
    its group has the first alone. Equal states are equal contexts, token for token: the first step's always are.

    Source: GiGPO, Feng et al. 2025 (arXiv 2505.10978), Eq. 3 to 8, with F_norm = 1 or std.
    """
    if batch.states is None:
        raise RuntimeError("gigpo compares states, and the batch has none")
    spans = step_spans(batch.steps)
    episodes = _relative(batch.rewards.sum(axis=1), batch.groups, params)
    alike = _within_groups(batch, spans, batch.states)
    steps = _relative(_step_returns(batch.rewards, spans, params), alike, params)
    _warn_of_groups_of_one(batch)
    advantages = np.repeat(episodes, spans.per_trajectory) + params.gigpo.weight * steps
    return without_critic(_on_steps(advantages, spans))


def reinforce_pp(batch: Batch, params: CreditParams) -> Estimate:
    """The discounted return to go (`gamma`) at every time step, then whitening over the batch.

    Tokens that are no time steps neither discount the return nor end it: an action receives what later steps earn,
    whatever observations stand in between.

    Source: REINFORCE++, Hu et al. 2025 (arXiv 2501.03262).
    """
    rewards, lengths = _rewards_at(batch.rewards, batch.time_steps), batch.time_steps.sum(axis=1)
    returns = _scatter(discounted_sums(rewards, lengths, params.gamma), batch.time_steps)
    return without_critic(whitened(returns, batch, params.whitening_floor))


def reinforce_pp_baseline(batch: Batch, params: CreditParams) -> Estimate:
    """R - mean within the group, then whitening over the batch; a trajectory alone in its group deviates by 0.

    Source: REINFORCE++ with baseline, Hu et al. 2025 (arXiv 2501.03262).
    """
    return without_critic(whitened(broadcast(_compare_returns(batch)[0], batch), batch, params.whitening_floor))


ESTIMATORS: dict[str, Callable[[Batch, CreditParams], Estimate]] = {
    each.__name__: each
    for each in (
        gae,
        step_gae,
        bi_level_gae,
        grpo,
        dr_grpo,
        rloo,
        step_return,
        gigpo,
        reinforce_pp,
        reinforce_pp_baseline,
    )
}


def estimate(batch: Batch, params: CreditParams) -> Estimate:
    """Runs the estimator that `params` names; a ValueError refuses values that it would not look at, or their lack."""
    if not params.needs_critic and batch.values is not None:
        raise ValueError(f"estimator {params.estimator} uses no values; give none, or set estimator: gae")
    return ESTIMATORS[params.estimator](batch, params)


def _critic_values(batch: Batch, params: CreditParams) -> Floats:
    """[B, L] the values of a batch; a ValueError where it has none."""
    if batch.values is None:
        raise ValueError(
            f"estimator {params.estimator} needs the values of a critic; give them, or set estimator: grpo"
        )
    return batch.values


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
    rows = _scatter(entries, filled)
    backwards = lfilter([1.0], [1.0, -factor], rows[:, ::-1], axis=1)  # y_n = x_n + factor y_{n-1}
    sums: Floats = backwards[:, ::-1][filled]
    return sums


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


def _step_rewards(rewards: Floats, spans: StepSpans) -> Floats:
    """[S] a step's reward is the sum of its tokens' rewards."""
    summed: Floats = np.add.reduceat(_rewards_at(rewards, spans.acting), spans.starts)
    return summed


def _step_advantages(rewards: Floats, values: Floats, spans: StepSpans, params: CreditParams) -> Floats:
    """[S] the advantages of steps with values [S]."""
    received, steps = _step_rewards(rewards, spans), spans.per_trajectory
    return generalized_advantages(received, values, steps, gamma=params.step_gamma, lam=params.step_lam)


def _step_returns(rewards: Floats, spans: StepSpans, params: CreditParams) -> Floats:
    """[S] what a step and those after it earn, discounted per step."""
    return discounted_sums(_step_rewards(rewards, spans), spans.per_trajectory, params.step_gamma)


def _within_groups(batch: Batch, spans: StepSpans, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """[S] numbers that are equal for the steps of one group with the same key [S]."""
    (_, group), (distinct, key) = (np.unique(each, return_inverse=True) for each in (batch.groups, keys))
    return np.repeat(group, spans.per_trajectory) * max(len(distinct), 1) + key


def _on_steps(advantages: Floats, spans: StepSpans) -> Floats:
    """[B, L] the advantage [S] of a step at each of its tokens."""
    return _scatter(np.repeat(advantages, spans.tokens), spans.acting)


def _relative(returns: Floats, groups: NDArray[np.int64], params: CreditParams) -> Floats:
    """Returns minus the mean of their group, divided by its std where `gigpo.std` says so."""
    deviations, stds, _ = group_statistics(returns, groups)
    return deviations / (stds + GROUP_EPSILON) if params.gigpo.std else deviations


def token_advantages(rewards: Floats, values: Floats, time_steps: Mask, params: CreditParams) -> Floats:
    """[B, L] the generalised advantages of every trajectory's time steps; tokens between them get exactly 0."""
    received, lengths = _rewards_at(rewards, time_steps), time_steps.sum(axis=1)
    flat = generalized_advantages(received, values[time_steps], lengths, gamma=params.gamma, lam=params.lam)
    return _scatter(flat, time_steps)


def _rewards_at(rewards: Floats, time_steps: Mask) -> Floats:
    """[N] of rewards [B, L] those at the time steps, where all of them must be."""
    if rewards[~time_steps].any():
        raise RuntimeError("a reward outside of the time steps would be lost")
    return rewards[time_steps]


def _compare_returns(batch: Batch) -> tuple[Floats, Floats, Counts]:
    """The `group_statistics` of the batch's returns, with a warning of trajectories that are alone in their group."""
    _warn_of_groups_of_one(batch)
    return group_statistics(batch.rewards.sum(axis=1), batch.groups)


def _warn_of_groups_of_one(batch: Batch) -> None:
    alone = np.count_nonzero(np.unique(batch.groups, return_counts=True)[1] == 1)
    if alone:
        logger.warning("%d of %d trajectories are alone in their group: their advantage is 0", alone, len(batch.groups))


def broadcast(advantages: Floats, batch: Batch) -> Floats:
    """[B, L] a trajectory's advantage [B] at each of its time steps, exactly 0 elsewhere."""
    return np.where(batch.time_steps, advantages[:, None], 0.0)


def _scatter(entries: Floats, mask: Mask) -> Floats:
    """[B, L] the entries [N] at the N tokens of the mask, 0 elsewhere."""
    tokens = np.zeros(mask.shape)
    tokens[mask] = entries
    return tokens


def without_critic(advantages: Floats) -> Estimate:
    """The estimate of an estimator that trains no critic."""
    nowhere = np.zeros(advantages.shape, np.bool_)
    return Estimate(advantages=advantages, value_targets=np.zeros_like(advantages), critic_mask=nowhere)
