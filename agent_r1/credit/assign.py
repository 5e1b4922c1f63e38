"""Credit assignment: what an iteration's rewards say about every token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit import masks
from agent_r1.credit.batch import Batch, Estimate
from agent_r1.credit.collate import collate
from agent_r1.credit.estimators import estimate
from agent_r1.credit.filters import differing, select
from agent_r1.credit.metrics import (
    advantage_metrics,
    filter_metrics,
    reward_metrics,
    rollout_metrics,
    value_metrics,
)
from agent_r1.credit.reference import kl_rewards, reference_metrics
from agent_r1.credit.repetition import repetition_metrics
from agent_r1.credit.rewards import Rewards, step_rewards
from agent_r1.params import CreditParams
from agent_r1.records import Credit, Trajectory

Floats = NDArray[np.float32]
T = TypeVar("T")

logger = logging.getLogger(__name__)


def assign(
    trajectories: Sequence[Trajectory],
    values: Sequence[Floats] | None,
    params: CreditParams,
    *,
    reference: Sequence[Floats] | None = None,
    questions: int | None = None,
) -> tuple[list[Credit], dict[str, float]]:
    """The credit of every trajectory of one iteration, in their order, and the iteration's metrics.

    A trajectory that `params.filter` drops is not `kept` and has no influence: it is in no statistic of the estimator,
    and its masks are empty, so that it is in no loss and no denominator either. A trajectory that is kept and whose
    advantages are 0 is another matter: its loss mask counts among the tokens that normalise the loss.

    Args:
        trajectories: of one iteration.
        values: the critic's value [L] at every token of every trajectory, or None without a critic.
        params: the estimator, its masks and the weights of the rewards.
        reference: the frozen reference's logprob [L] of every token of the loss mask, or None without one. With
            `kl_reward` the penalty joins the rewards that the estimator sees, hence the returns of group estimators;
            `Credit.return_`, the filter and the reward metrics stay with those of the episode.
        questions: how many groups the filter's share of groups is of; all there are unless a refill has added some.

    Raises:
        ValueError: there is nothing to credit, a reward, value or logprob is not finite, the values do not suit the
            estimator, or `kl_reward` has no reference.
    """
    _check(trajectories, values)
    if reference is None and params.kl_reward:
        raise ValueError(f"kl_reward {params.kl_reward} needs a reference's logprobs; give them, or set it to 0")
    rewards = [step_rewards(trajectory, params.rewards) for trajectory in trajectories]
    totals = [total for total, _ in rewards]
    groups = np.array([trajectory.group for trajectory in trajectories], dtype=np.int64)
    selection = select(np.array([total.sum() for total in totals]), groups, params.filter, questions)
    if not selection.kept.any():
        logger.warning("the returns of no group differ: filter %s leaves nothing to train on", params.filter.kind)
    kl = None if reference is None else [kl_rewards(*pair) for pair in zip(trajectories, reference, strict=True)]
    credits_ = _credits(trajectories, totals, values, kl, selection.kept, params)
    if reference is not None:
        credits_ = [_with_reference(credit, row) for credit, row in zip(credits_, reference, strict=True)]
    metrics = {
        **rollout_metrics(trajectories),
        **repetition_metrics(trajectories),
        **reward_metrics(totals, [parts for _, parts in rewards], groups),
        **filter_metrics(selection, params.filter),
        **advantage_metrics(trajectories, credits_),
        **value_metrics(credits_),
        **({} if kl is None else reference_metrics(trajectories, kl)),
    }
    logger.info(
        "credit: %d trajectories, mean return %.3f, %d kept",
        len(credits_),
        metrics["reward/total"],
        selection.kept.sum(),
    )
    return credits_, metrics


def groups_to_refill(trajectories: Sequence[Trajectory], questions: int, params: CreditParams) -> int:
    """How many groups an iteration lacks of `questions` whose returns differ: what a refill is to bring."""
    returns = np.array([step_rewards(trajectory, params.rewards)[0].sum() for trajectory in trajectories])
    return questions - differing(returns, np.array([trajectory.group for trajectory in trajectories], dtype=np.int64))


def _credits(
    trajectories: Sequence[Trajectory],
    totals: Sequence[Rewards],
    values: Sequence[Floats] | None,
    kl: Sequence[NDArray[np.float64]] | None,
    kept: masks.Mask,
    params: CreditParams,
) -> list[Credit]:
    """Credit of all; the estimator sees the kept trajectories alone."""
    credits_ = [_filtered_out(trajectory, total) for trajectory, total in zip(trajectories, totals, strict=True)]
    rows = np.flatnonzero(kept).tolist()
    if not rows:
        return credits_
    batch = collate(
        [trajectories[i] for i in rows], [totals[i] for i in rows], _chosen(values, rows), _chosen(kl, rows), params
    )
    estimated = estimate(batch, params)
    for row, i in enumerate(rows):
        credits_[i] = _credit(row, trajectories[i], totals[i], batch, estimated, params)
    return credits_


def _chosen(items: Sequence[T] | None, rows: Sequence[int]) -> list[T] | None:
    return None if items is None else [items[i] for i in rows]


def _credit(
    row: int, trajectory: Trajectory, total: Rewards, batch: Batch, estimated: Estimate, params: CreditParams
) -> Credit:
    length = len(trajectory.token_ids)
    values = np.zeros(length) if batch.values is None else batch.values[row, :length]
    return Credit(
        trajectory_id=trajectory.trajectory_id,
        return_=float(total.sum()),
        advantages=estimated.advantages[row, :length].astype(np.float32),
        values=values.astype(np.float32),
        value_targets=estimated.value_targets[row, :length].astype(np.float32),
        reference_logprobs=np.zeros(length, np.float32),
        loss_mask=masks.loss_mask(trajectory.source, params.loss_mask),
        critic_mask=estimated.critic_mask[row, :length],
        kept=True,
    )


def _filtered_out(trajectory: Trajectory, total: Rewards) -> Credit:
    zeros = np.zeros(len(trajectory.token_ids), np.float32)
    nowhere = np.zeros(len(trajectory.token_ids), np.bool_)
    return Credit(
        trajectory_id=trajectory.trajectory_id,
        return_=float(total.sum()),
        advantages=zeros,
        values=zeros,
        value_targets=zeros,
        reference_logprobs=zeros,
        loss_mask=nowhere,
        critic_mask=nowhere,
        kept=False,
    )


def _with_reference(credit: Credit, logprobs: Floats) -> Credit:
    return replace(credit, reference_logprobs=np.where(credit.loss_mask, logprobs, np.float32(0)))


def _check(trajectories: Sequence[Trajectory], values: Sequence[NDArray[np.float32]] | None) -> None:
    if not any(trajectory.action_mask.any() for trajectory in trajectories):
        raise ValueError(
            f"none of the {len(trajectories)} trajectories holds a sampled token; if their prompts fill the whole "
            "budget, raise env.max_tokens"
        )
    if values is None:
        return
    for trajectory, row in zip(trajectories, values, strict=True):
        assert len(row) == len(trajectory.token_ids), f"{trajectory.trajectory_id}: {len(row)} values"
        if not np.isfinite(row).all():
            raise ValueError(
                f"trajectory {trajectory.trajectory_id!r}: the critic's values are not finite; "
                "lower train.update.critic_learning_rate"
            )
