"""Credit assignment: what an iteration's rewards say about every token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit.batch import Floats, Mask, collate, groups_of, select_tokens
from agent_r1.credit.collapse import repetition_metrics
from agent_r1.credit.estimators import estimate
from agent_r1.credit.filters import differing, left_out, select
from agent_r1.credit.metrics import (
    advantage_metrics,
    left_out_metrics,
    reference_metrics,
    returns_of,
    reward_metrics,
    rollout_metrics,
    value_metrics,
)
from agent_r1.credit.rewards import step_rewards
from agent_r1.params.credit import CreditParams
from agent_r1.records import Credit, Trajectory

TokenFloats = NDArray[np.float32]  # [L] as the models give them

logger = logging.getLogger(__name__)


class Scored(NamedTuple):
    """The models' numbers for every trajectory, None without such a model."""

    values: Sequence[TokenFloats] | None  # the critic's
    reference: Sequence[TokenFloats] | None  # logprobs of the frozen reference


def assign(
    trajectories: Sequence[Trajectory],
    values: Sequence[TokenFloats] | None,
    params: CreditParams,
    *,
    reference: Sequence[TokenFloats] | None = None,
    questions: int | None = None,
    max_tokens: int | None = None,
) -> tuple[list[Credit], dict[str, float]]:
    """The credit of every trajectory of one iteration, in their order, and the iteration's metrics.

    An episode that the world cut short (ABORTED) is treated as if it had never been: it is in no filter, statistic,
    group or loss, and no metric but `outcome/aborted` knows of it. A trajectory that `params.filter` drops is not
    `kept` and has no influence: it is in no statistic of the estimator, and its masks are empty, so that it is in no
    loss and no denominator either. One that `params.left_out` names is kept, in all statistics and in the critic's
    training; only its loss mask is empty. A trajectory that is kept and whose advantages are 0 is another matter: its
    loss mask counts among the tokens that normalise the loss.

    Args:
        values: the critic's value [L] at every token of every trajectory, or None without a critic.
        reference: the frozen reference's logprob [L] of every action token, or None without one. With
            `kl_reward` the penalty joins the rewards that the estimator sees, hence the returns of group estimators;
            `Credit.return_`, the filter and the reward metrics stay with those of the episode.
        questions: how many groups the filter's share of groups is of; all there are unless a refill has added some.
        max_tokens: the world's limit of a context, which `rewards.overlong` needs.

    Raises ValueError if there is nothing to credit, a reward, value or logprob is not finite, the values do not suit
    the estimator, `kl_reward` has no reference, or `rewards.overlong` no limit.
    """
    lived = _lived(trajectories)
    if not lived:
        raise ValueError(f"the world cut all {len(trajectories)} episodes short; lower env.aborted_share")

    def of_the_living(rows: Sequence[TokenFloats] | None) -> list[TokenFloats] | None:
        return None if rows is None else [rows[index] for index in lived]

    credited, metrics = _assign(
        [trajectories[index] for index in lived],
        Scored(of_the_living(values), of_the_living(reference)),
        params,
        questions,
        max_tokens,
    )
    found = dict(zip(lived, credited, strict=True))
    credits_ = [found.get(index) or _uncredited(each) for index, each in enumerate(trajectories)]
    return credits_, metrics | {"outcome/aborted": 1 - len(lived) / len(trajectories)}


def _lived(trajectories: Sequence[Trajectory]) -> list[int]:
    """The indices of the trajectories that the world did not cut short."""
    return [index for index, each in enumerate(trajectories) if not each.aborted]


def _assign(
    trajectories: Sequence[Trajectory],
    scored: Scored,
    params: CreditParams,
    questions: int | None,
    max_tokens: int | None,
) -> tuple[list[Credit], dict[str, float]]:
    """`assign` without aborted trajectories."""
    _check(trajectories, scored.values)
    reference = scored.reference
    if reference is None and params.kl_reward:
        raise ValueError(f"kl_reward {params.kl_reward} needs a reference's logprobs; give them, or set it to 0")
    totals, parts = zip(*(step_rewards(trajectory, params, max_tokens) for trajectory in trajectories), strict=True)
    groups = groups_of(trajectories)
    kept, share, threshold = select(returns_of(totals), groups, params.filter, questions)
    if not kept.any():
        logger.warning("the returns of no group differ: filter %s leaves nothing to train on", params.filter.kind)
    kl = None if reference is None else [kl_rewards(*pair) for pair in zip(trajectories, reference, strict=True)]
    credits_ = _credits(trajectories, totals, scored, kl, kept, params)
    if kept.any() and not any(credit.loss_mask.any() for credit in credits_):
        logger.warning("left_out leaves the policy loss no trajectory")
    filtered = {"filter/kept_share": share, "filter/std_threshold": threshold}
    metrics = {
        **rollout_metrics(trajectories),
        **repetition_metrics(trajectories),
        **reward_metrics(totals, parts, groups),
        **({} if params.filter.kind == "none" else filtered),
        **left_out_metrics(trajectories, params),
        **advantage_metrics(trajectories, credits_),
        **value_metrics(credits_),
        **({} if kl is None else reference_metrics(trajectories, kl)),
    }
    return credits_, metrics


def groups_to_refill(
    trajectories: Sequence[Trajectory], questions: int, params: CreditParams, max_tokens: int | None = None
) -> int:
    """How many groups an iteration lacks of `questions` whose returns differ: what a refill is to bring."""
    lived = [trajectories[index] for index in _lived(trajectories)]
    returns = returns_of([step_rewards(trajectory, params, max_tokens)[0] for trajectory in lived])
    return questions - differing(returns, groups_of(lived))


def kl_rewards(trajectory: Trajectory, reference: TokenFloats) -> Floats:
    """[L] reference logprob - sampler's logprob at action tokens, 0 elsewhere; nats, before the coefficient.

    Its expectation under the policy is -KL(policy || reference): the estimate k1, the only one of the usual three
    whose gradient through the reward is that of the divergence.

    Source: Ouyang et al. 2022 (arXiv 2203.02155), Eq. 2; k1, k3: Schulman 2020, joschu.net/blog/kl-approx.html.
    """
    if len(reference) != len(trajectory.token_ids):
        raise ValueError(f"trajectory {trajectory.trajectory_id!r}: {len(reference)} logprobs of the reference")
    rewards = np.where(trajectory.action_mask, reference.astype(np.float64) - trajectory.logprobs, 0.0)
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"trajectory {trajectory.trajectory_id!r}: a logprob of the sampler or of the reference is not finite; "
            "lower train.update.learning_rate and start again from the checkpoint"
        )
    return rewards


def _check(trajectories: Sequence[Trajectory], values: Sequence[TokenFloats] | None) -> None:
    if not any(trajectory.action_mask.any() for trajectory in trajectories):
        raise ValueError(
            f"none of the {len(trajectories)} trajectories holds a sampled token; if their prompts fill the whole "
            "budget, raise env.max_tokens"
        )
    for trajectory, row in [] if values is None else zip(trajectories, values, strict=True):
        if len(row) != len(trajectory.token_ids):
            raise ValueError(f"trajectory {trajectory.trajectory_id!r}: {len(row)} values of the critic")
        if not np.isfinite(row).all():
            raise ValueError(
                f"trajectory {trajectory.trajectory_id!r}: the critic's values are not finite; "
                "lower train.update.critic.learning_rate"
            )


def _credits(
    trajectories: Sequence[Trajectory],
    totals: Sequence[Floats],
    scored: Scored,
    kl: Sequence[Floats] | None,
    kept: Mask,
    params: CreditParams,
) -> list[Credit]:
    """The credit of every trajectory; the estimator sees the kept ones alone."""
    values, reference = scored
    pairs = zip(trajectories, totals, strict=True)
    credits_ = [_uncredited(trajectory, float(total.sum())) for trajectory, total in pairs]
    rows = np.flatnonzero(kept).tolist()
    if not rows:
        return credits_
    estimated = estimate(collate(trajectories, totals, values, kl, rows, params), params)
    out = left_out(trajectories, params.left_out)
    for row, i in enumerate(rows):
        bare, length = credits_[i], len(trajectories[i].token_ids)
        mask = select_tokens(trajectories[i].source, params.loss_mask) & ~out[i]
        acting = trajectories[i].action_mask
        credits_[i] = replace(
            bare,
            advantages=estimated.advantages[row, :length].astype(np.float32),
            values=values[i] if values else bare.values,
            value_targets=estimated.value_targets[row, :length].astype(np.float32),
            reference_logprobs=np.where(acting, reference[i], np.float32(0)) if reference else bare.reference_logprobs,
            loss_mask=mask,
            critic_mask=estimated.critic_mask[row, :length],
            kept=True,
        )
    return credits_


def _uncredited(trajectory: Trajectory, return_: float = 0.0) -> Credit:
    """The credit of a trajectory that is no part of the update."""
    zeros = np.zeros(len(trajectory.token_ids), np.float32)
    return Credit(
        trajectory_id=trajectory.trajectory_id,
        return_=return_,
        advantages=zeros,
        values=zeros,
        value_targets=zeros,
        reference_logprobs=zeros,
        loss_mask=zeros > 0,
        critic_mask=zeros > 0,
        kept=False,
    )
