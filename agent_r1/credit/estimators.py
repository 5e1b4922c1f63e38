"""The advantage estimators: with a critic, within groups, and REINFORCE++.

Legend for shapes: B = trajectories of a batch, L = tokens of the longest, N = selected tokens of all trajectories, one
after the other, S = sequences of such tokens, such as the steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from agent_r1.credit.batch import (
    Batch,
    StepSpans,
    broadcast,
    discounted_sums,
    generalized_advantages,
    group_statistics,
    on_steps,
    rewards_at,
    scatter,
    step_advantages,
    step_returns,
    step_spans,
    token_advantages,
    whitened,
)
from agent_r1.params.credit import CreditParams
from agent_r1.records import Floats, Int64s, Mask

GROUP_EPSILON = 1e-6  # added to the std of a group
ROUNDING = 1e-9  # of a sum of rewards

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The advantages and the critic's targets of a batch."""

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
    raw = step_advantages(batch.rewards, values, spans, params)
    targets = step_advantages(batch.rewards, values, spans, params.of_targets) + values
    return Estimate(
        advantages=whitened(on_steps(raw, spans), batch, params.whitening_floor),
        value_targets=scatter(targets, spans.first),
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
        advantages=whitened(scatter(raw, spans.acting), batch, params.whitening_floor),
        value_targets=scatter(targets, spans.acting),
        critic_mask=spans.acting,
    )


def _two_levels(rewards: Floats, values: Floats, spans: StepSpans, params: CreditParams) -> Floats:
    """[N] the advantages of action tokens with values [N], over steps and then over the tokens of each."""
    ends = spans.starts + spans.tokens - 1
    returns = np.zeros(len(values))
    returns[ends] = step_advantages(rewards, values[ends], spans, params) + values[ends]
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


def maxrl(batch: Batch, params: CreditParams) -> Estimate:
    """(R - mean) / mean within the group; 0 where all returns are 0, and in a group of one.

    Where a return is 1 or 0, its gradient tends to that of log P(success) as a group grows: a question weighs the more
    the harder it is. A ValueError refuses a negative return.

    Source: MaxRL, Tajwar et al. 2026 (arXiv 2602.02710); `p_normalization` of its authors' code.
    """
    deviations, _, _ = _compare_returns(batch)
    returns = batch.rewards.sum(axis=1)
    least = returns.min()
    if least < -ROUNDING:
        raise ValueError(f"estimator maxrl takes returns of 0 and above, and one is {least:g}; weigh no part below 0")
    means = returns - deviations
    return without_critic(broadcast(deviations / np.where(means > ROUNDING, means, 1.0), batch))


def rloo(batch: Batch, params: CreditParams) -> Estimate:
    """R minus the mean of the group's others, which is n / (n - 1) (R - mean) in a group of n; 0 in a group of one.

    Source: Kool et al. 2019; Ahmadian et al. 2024 (arXiv 2402.14740), Eq. 9.
    """
    deviations, _, sizes = _compare_returns(batch)
    return without_critic(broadcast(deviations * sizes / np.maximum(sizes - 1, 1), batch))


def step_return(batch: Batch, params: CreditParams) -> Estimate:
    """The step's return to go minus its mean over the group's trajectories that have a step of this index.

    The return to go is discounted by `step_gamma` per step, so a step is not credited with earlier rewards.
    The mean stands for the value of having come so far, and does not depend on this step's action, as a baseline must
    not. A step that no other trajectory of the group has gets 0.

    Source: returns to go of turns as advantages: GTPO (arXiv 2511.14846); a baseline per time step: Greensmith et al.
    2004 (JMLR 5); no std: Dr. GRPO (arXiv 2503.20783), §3.2.
    """
    _warn_of_groups_of_one(batch)
    spans = step_spans(batch.steps)
    of_this_index = _within_groups(batch, spans, batch.steps[spans.first].astype(np.int64))
    deviations, _, _ = group_statistics(step_returns(batch.rewards, spans, params), of_this_index)
    return without_critic(on_steps(deviations, spans))


def gigpo(batch: Batch, params: CreditParams) -> Estimate:
    """The episode against its group, plus `gigpo.weight` times the step against the group's steps in the same state.

    The first compares returns, as `dr_grpo` does, the second returns to go (`step_gamma` per step). With `gigpo.std`
    each is divided by the sample std of its comparison, as in `grpo`. A step whose state occurs once in its group has
    the first alone. Equal states are those of the environment or, as `gigpo.state` says, equal contexts: `step_states`.
    With `gigpo.history` the step alone counts: see `_by_history`.

    Source: GiGPO, Feng et al. 2025 (arXiv 2505.10978), Eq. 3 to 8, with F_norm = 1 or std; its anchor states are the
    environment's. With a history: HGPO, He et al. 2026 (arXiv 2602.22817), as its authors' code has it.
    """
    if batch.states is None:
        raise RuntimeError("gigpo compares states, and the batch has none")
    _warn_of_groups_of_one(batch)
    spans = step_spans(batch.steps)
    returns = step_returns(batch.rewards, spans, params)
    alike = _within_groups(batch, spans, batch.states)
    if params.gigpo.history:
        return without_critic(on_steps(params.gigpo.weight * _by_history(returns, alike, spans, params), spans))
    episodes = _relative(batch.rewards.sum(axis=1), batch.groups, params)
    steps = _relative(returns, alike, params)
    advantages = np.repeat(episodes, spans.per_trajectory) + params.gigpo.weight * steps
    return without_critic(on_steps(advantages, spans))


def _by_history(returns: Floats, alike: Int64s, spans: StepSpans, params: CreditParams) -> Floats:
    """[S] the mean over k = 1 to `gigpo.history` + 1 of the step against those whose last k states are the same.

    A comparison over k states weighs k + 1. One that says nothing, as of a step alone, is left out.
    """
    states = alike
    total, weights = np.zeros((2, len(returns)))
    opens = (np.cumsum(spans.per_trajectory) - spans.per_trajectory)[spans.per_trajectory > 0]
    for k in range(1, params.gigpo.history + 2):
        comparison = _relative(returns, alike, params)
        total += (k + 1) * comparison
        weights += (k + 1) * (comparison != 0)
        previous = np.roll(alike, 1)
        previous[opens] = -1 - opens  # a first step has no state before it: it is alone from now on
        alike = np.unique(np.stack([previous, states]), axis=1, return_inverse=True)[1].ravel()
    mean: Floats = total / np.maximum(weights, 1)
    return mean


def reinforce_pp(batch: Batch, params: CreditParams) -> Estimate:
    """The discounted return to go (`gamma`) at every time step, then whitening over the batch.

    Tokens that are no time steps neither discount the return nor end it: an action receives the rewards of later steps
    across observations.

    Source: REINFORCE++, Hu et al. 2025 (arXiv 2501.03262).
    """
    rewards = rewards_at(batch.rewards, batch.time_steps)
    lengths = batch.time_steps.sum(axis=1)
    returns = scatter(discounted_sums(rewards, lengths, params.gamma), batch.time_steps)
    return without_critic(whitened(returns, batch, params.whitening_floor))


def reinforce_pp_baseline(batch: Batch, params: CreditParams) -> Estimate:
    """R - mean within the group, then whitening over the batch; a trajectory alone in its group deviates by 0.

    Source: REINFORCE++ with baseline, Hu et al. 2025 (arXiv 2501.03262).
    """
    return without_critic(whitened(broadcast(_compare_returns(batch)[0], batch), batch, params.whitening_floor))


_WITH_CRITIC = (gae, step_gae, bi_level_gae)
_WITHOUT = (grpo, dr_grpo, maxrl, rloo, step_return, gigpo, reinforce_pp, reinforce_pp_baseline)
ESTIMATORS: dict[str, Callable[[Batch, CreditParams], Estimate]] = {
    estimator.__name__: estimator for estimator in (*_WITH_CRITIC, *_WITHOUT)
}


def estimate(batch: Batch, params: CreditParams) -> Estimate:
    """Runs the estimator that `params` names. A ValueError refuses values that it would not read, or their lack."""
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


def _within_groups(batch: Batch, spans: StepSpans, keys: Int64s) -> Int64s:
    """[S] numbers that are equal for the steps of one group with the same key [S]."""
    _, group = np.unique(batch.groups, return_inverse=True)
    distinct, key = np.unique(keys, return_inverse=True)
    return np.repeat(group, spans.per_trajectory) * max(len(distinct), 1) + key


def _relative(returns: Floats, groups: Int64s, params: CreditParams) -> Floats:
    """Returns minus the mean of their group, divided by its std where `gigpo.std` says so."""
    deviations, stds, _ = group_statistics(returns, groups)
    return deviations / (stds + GROUP_EPSILON) if params.gigpo.std else deviations


def _compare_returns(batch: Batch) -> tuple[Floats, Floats, Int64s]:
    """The `group_statistics` of the batch's returns, with a warning of trajectories that are alone in their group."""
    _warn_of_groups_of_one(batch)
    return group_statistics(batch.rewards.sum(axis=1), batch.groups)


def _warn_of_groups_of_one(batch: Batch) -> None:
    singles = np.count_nonzero(np.unique(batch.groups, return_counts=True)[1] == 1)
    if singles:
        logger.warning(
            "%d of %d trajectories are alone in their group: their advantage is 0", singles, len(batch.groups)
        )


def without_critic(advantages: Floats) -> Estimate:
    """The estimate of an estimator that trains no critic."""
    nowhere = np.zeros(advantages.shape, np.bool_)
    return Estimate(advantages=advantages, value_targets=np.zeros_like(advantages), critic_mask=nowhere)
