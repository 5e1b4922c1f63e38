"""Credit assignment: what an iteration's rewards say about every token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit import masks
from agent_r1.credit.estimators import ESTIMATORS, Batch, Estimate
from agent_r1.credit.metrics import advantage_metrics, reward_metrics, rollout_metrics, value_metrics
from agent_r1.credit.repetition import repetition_metrics
from agent_r1.credit.rewards import Rewards, step_rewards
from agent_r1.params import CreditParams
from agent_r1.records import Credit, Trajectory

logger = logging.getLogger(__name__)


def assign(
    trajectories: Sequence[Trajectory], values: Sequence[NDArray[np.float32]] | None, params: CreditParams
) -> tuple[list[Credit], dict[str, float]]:
    """The credit of every trajectory of one iteration, in their order, and the iteration's metrics.

    `values` holds the critic's value [L] at every token of every trajectory, or is None without a critic.

    A trajectory is not `kept` where it has no gradient to give: its advantage is 0 at every token of its loss mask
    and no critic is trained on it. The update may skip it, and must still count its loss mask in the number of
    tokens that normalises the loss: then skipping changes nothing but the time it takes.

    Raises:
        ValueError: there is nothing to credit, a reward or value is not finite, or the values do not suit the
            estimator.
    """
    _check(trajectories, values)
    rewards = [step_rewards(trajectory, params.rewards) for trajectory in trajectories]
    totals = [total for total, _ in rewards]
    batch = _batch(trajectories, totals, values, params)
    estimate = ESTIMATORS[params.estimator](batch, params)
    credits_ = [_credit(i, trajectory, batch, estimate, params) for i, trajectory in enumerate(trajectories)]
    metrics = {
        **rollout_metrics(trajectories),
        **repetition_metrics(trajectories),
        **reward_metrics(totals, [parts for _, parts in rewards], batch.groups),
        **advantage_metrics(trajectories, credits_),
        **value_metrics(credits_),
    }
    logger.info(
        "credit: %d trajectories, mean return %.3f, %d kept",
        len(credits_),
        metrics["reward/total"],
        sum(credit.kept for credit in credits_),
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
    advantages = estimate.advantages[i, :length].astype(np.float32)
    values = np.zeros(length) if batch.values is None else batch.values[i, :length]
    loss_mask = masks.loss_mask(trajectory.source, params.loss_mask)
    critic_mask = batch.critic_mask[i, :length]
    return Credit(
        trajectory_id=trajectory.trajectory_id,
        return_=float(batch.rewards[i].sum()),
        advantages=advantages,
        values=values.astype(np.float32),
        value_targets=estimate.value_targets[i, :length].astype(np.float32),
        loss_mask=loss_mask,
        critic_mask=critic_mask,
        kept=bool(advantages[loss_mask].any() or critic_mask.any()),
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
