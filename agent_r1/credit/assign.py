"""Credit assignment: what an iteration's rewards say about every token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit import masks
from agent_r1.credit.estimators import ESTIMATORS, Batch, Estimate
from agent_r1.credit.filters import select
from agent_r1.credit.metrics import (
    advantage_metrics,
    filter_metrics,
    reward_metrics,
    rollout_metrics,
    value_metrics,
)
from agent_r1.credit.rewards import Rewards, step_rewards
from agent_r1.params import CreditParams
from agent_r1.records import Credit, Trajectory

logger = logging.getLogger(__name__)


def assign(
    trajectories: Sequence[Trajectory], values: Sequence[NDArray[np.float32]] | None, params: CreditParams
) -> tuple[list[Credit], dict[str, float]]:
    """The credit of every trajectory of one iteration, in their order, and the iteration's metrics.

    `values` holds the critic's value [L] at every token of every trajectory, or is None without a critic.

    A trajectory that `params.filter` drops is not `kept` and has no influence: it is in no statistic of the estimator,
    and its masks are empty, so that it is in no loss and no denominator either. A trajectory that is kept and whose
    advantages are 0 is another matter: its loss mask counts among the tokens that normalise the loss.

    Raises:
        ValueError: there is nothing to credit, a reward or value is not finite, or the values do not suit the
            estimator.
    """
    _check(trajectories, values)
    rewards = [step_rewards(trajectory, params.rewards) for trajectory in trajectories]
    totals = [total for total, _ in rewards]
    groups = np.array([trajectory.group for trajectory in trajectories], dtype=np.int64)
    selection = select(np.array([total.sum() for total in totals]), groups, params.filter)
    if not selection.kept.any():
        logger.warning("the returns of no group differ: filter %s leaves nothing to train on", params.filter.kind)
    credits_ = _credits(trajectories, totals, values, selection.kept, params)
    metrics = {
        **rollout_metrics(trajectories),
        **reward_metrics(totals, [parts for _, parts in rewards], groups),
        **filter_metrics(selection, params.filter),
        **advantage_metrics(trajectories, credits_),
        **value_metrics(credits_),
    }
    logger.info(
        "credit: %d trajectories, mean return %.3f, %d kept",
        len(credits_),
        metrics["reward/total"],
        selection.kept.sum(),
    )
    return credits_, metrics


def token_rewards(trajectory: Trajectory, step_totals: Rewards) -> Rewards:
    """[L] every step's reward at its last action token, whatever comes after it (law 4)."""
    rewards = np.zeros(len(trajectory.token_ids))
    last_tokens = [step.action_stop - 1 for step in trajectory.steps]
    assert trajectory.action_mask[last_tokens].all(), f"{trajectory.trajectory_id}: a step ends on an unsampled token"
    rewards[last_tokens] = step_totals
    return rewards


def pad(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """[B, L] the rows side by side, filled with 0 on the right up to the longest."""
    lengths = np.array([len(row) for row in rows])
    padded = np.zeros((len(rows), lengths.max()), dtype=rows[0].dtype)
    padded[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(rows)
    return padded


def _credits(
    trajectories: Sequence[Trajectory],
    totals: Sequence[Rewards],
    values: Sequence[NDArray[np.float32]] | None,
    kept: masks.Mask,
    params: CreditParams,
) -> list[Credit]:
    """Credit of all; the estimator sees the kept trajectories alone."""
    estimated = iter(
        _estimated(
            list(compress(trajectories, kept)),
            list(compress(totals, kept)),
            None if values is None else list(compress(values, kept)),
            params,
        )
    )
    return [
        next(estimated) if keep else _filtered_out(trajectory, total)
        for trajectory, total, keep in zip(trajectories, totals, kept, strict=True)
    ]


def _estimated(
    trajectories: Sequence[Trajectory],
    totals: Sequence[Rewards],
    values: Sequence[NDArray[np.float32]] | None,
    params: CreditParams,
) -> list[Credit]:
    if not trajectories:
        return []
    batch = _batch(trajectories, totals, values, params)
    estimate = ESTIMATORS[params.estimator](batch, params)
    return [_credit(i, trajectory, batch, estimate, params) for i, trajectory in enumerate(trajectories)]


def _filtered_out(trajectory: Trajectory, total: Rewards) -> Credit:
    zeros = np.zeros(len(trajectory.token_ids), np.float32)
    nowhere = np.zeros(len(trajectory.token_ids), np.bool_)
    return Credit(
        trajectory_id=trajectory.trajectory_id,
        return_=float(total.sum()),
        advantages=zeros,
        values=zeros,
        value_targets=zeros,
        loss_mask=nowhere,
        critic_mask=nowhere,
        kept=False,
    )


def _batch(
    trajectories: Sequence[Trajectory],
    totals: Sequence[Rewards],
    values: Sequence[NDArray[np.float32]] | None,
    params: CreditParams,
) -> Batch:
    switches = params.advantage_mask
    sources = [trajectory.source for trajectory in trajectories]
    critic = pad([masks.critic_mask(source, switches.critic) for source in sources])
    return Batch(
        rewards=pad([token_rewards(t, total) for t, total in zip(trajectories, totals, strict=True)]),
        values=None if values is None else pad(values).astype(np.float64),
        time_steps=pad([masks.time_steps(source, switches.recursion) for source in sources]),
        whitening_mask=pad([masks.whitening_mask(source, switches.whitening) for source in sources]),
        critic_mask=critic if values is not None else np.zeros_like(critic),
        groups=np.array([trajectory.group for trajectory in trajectories], dtype=np.int64),
    )


def _credit(i: int, trajectory: Trajectory, batch: Batch, estimate: Estimate, params: CreditParams) -> Credit:
    length = len(trajectory.token_ids)
    values = np.zeros(length) if batch.values is None else batch.values[i, :length]
    return Credit(
        trajectory_id=trajectory.trajectory_id,
        return_=float(batch.rewards[i].sum()),
        advantages=estimate.advantages[i, :length].astype(np.float32),
        values=values.astype(np.float32),
        value_targets=estimate.value_targets[i, :length].astype(np.float32),
        loss_mask=masks.loss_mask(trajectory.source, params.loss_mask),
        critic_mask=batch.critic_mask[i, :length],
        kept=True,
    )


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
