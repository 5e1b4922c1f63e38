"""Credit assignment: what an iteration's rewards say about every token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit import masks
from agent_r1.credit.batch import Batch, Estimate
from agent_r1.credit.estimators import estimate
from agent_r1.credit.metrics import advantage_metrics, reward_metrics, rollout_metrics, value_metrics
from agent_r1.credit.reference import kl_rewards, reference_metrics
from agent_r1.credit.rewards import Rewards, step_rewards
from agent_r1.params import CreditParams
from agent_r1.records import Credit, Trajectory

NO_STEP = -1

logger = logging.getLogger(__name__)


def assign(
    trajectories: Sequence[Trajectory],
    values: Sequence[NDArray[np.float32]] | None,
    params: CreditParams,
    *,
    reference: Sequence[NDArray[np.float32]] | None = None,
    regularised: bool = False,
) -> tuple[list[Credit], dict[str, float]]:
    """The credit of every trajectory of one iteration, in their order, and the iteration's metrics.

    A trajectory is not `kept` where it has no gradient to give: its advantage is 0 at every token of its loss mask
    and no critic is trained on it. The update may skip it, and must still count its loss mask in the number of
    tokens that normalises the loss: then skipping changes nothing but the time it takes.

    Args:
        trajectories: of one iteration.
        values: the critic's value [L] at every token of every trajectory, or None without a critic.
        params: the estimator, its masks and the weights of the rewards.
        reference: the frozen reference's logprob [L] of every token of the loss mask, or None without one. With
            `kl_reward` the penalty joins the rewards that the estimator sees, hence the returns of group estimators;
            `Credit.return_` and the reward metrics stay those of the episode.
        regularised: whether the policy loss has terms beside the advantage's, so that every trajectory has a
            gradient to give.

    Raises:
        ValueError: there is nothing to credit, a reward, value or logprob is not finite, the values do not suit the
            estimator, or `kl_reward` has no reference.
    """
    _check(trajectories, values)
    if reference is None and params.kl_reward:
        raise ValueError(f"kl_reward {params.kl_reward} needs a reference's logprobs; give them, or set it to 0")
    rewards = [step_rewards(trajectory, params.rewards) for trajectory in trajectories]
    totals = [total for total, _ in rewards]
    batch = _batch(trajectories, totals, values, params)
    kl = None if reference is None else [kl_rewards(*pair) for pair in zip(trajectories, reference, strict=True)]
    estimated = estimate(_penalised(batch, kl, params.kl_reward), params)
    credits_ = [
        _credit(i, trajectory, batch, estimated, params, None if reference is None else reference[i], regularised)
        for i, trajectory in enumerate(trajectories)
    ]
    metrics = {
        **rollout_metrics(trajectories),
        **reward_metrics(totals, [parts for _, parts in rewards], batch.groups),
        **advantage_metrics(trajectories, credits_),
        **value_metrics(credits_),
        **({} if kl is None else reference_metrics(trajectories, kl)),
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


def token_steps(trajectory: Trajectory) -> NDArray[np.int32]:
    """[L] the index of the step that an action token belongs to, -1 at every other token."""
    steps = np.full(len(trajectory.token_ids), NO_STEP, dtype=np.int32)
    for k, step in enumerate(trajectory.steps):
        steps[step.action_start : step.action_stop] = k
    assert np.array_equal(steps >= 0, trajectory.action_mask), f"{trajectory.trajectory_id}: steps are not the actions"
    return steps


def pad(rows: Sequence[NDArray[Any]], fill: int = 0) -> NDArray[Any]:
    """[B, L] the rows side by side, filled on the right up to the longest."""
    lengths = np.array([len(row) for row in rows])
    padded = np.full((len(rows), lengths.max()), fill, dtype=rows[0].dtype)
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
    return Batch(
        rewards=pad([token_rewards(t, total) for t, total in zip(trajectories, totals, strict=True)]),
        values=None if values is None else pad(values).astype(np.float64),
        steps=pad([token_steps(trajectory) for trajectory in trajectories], fill=NO_STEP),
        time_steps=pad([masks.time_steps(source, switches.recursion) for source in sources]),
        whitening_mask=pad([masks.whitening_mask(source, switches.whitening) for source in sources]),
        critic_mask=pad([masks.critic_mask(source, switches.critic) for source in sources]),
        groups=np.array([trajectory.group for trajectory in trajectories], dtype=np.int64),
    )


def _penalised(batch: Batch, kl: Sequence[NDArray[np.float64]] | None, coefficient: float) -> Batch:
    """The batch with the KL penalty in its rewards."""
    return batch if kl is None or not coefficient else replace(batch, rewards=batch.rewards + coefficient * pad(kl))


def _credit(
    i: int,
    trajectory: Trajectory,
    batch: Batch,
    estimated: Estimate,
    params: CreditParams,
    reference: NDArray[np.float32] | None,
    regularised: bool,
) -> Credit:
    length = len(trajectory.token_ids)
    advantages = estimated.advantages[i, :length].astype(np.float32)
    values = np.zeros(length) if batch.values is None else batch.values[i, :length]
    loss_mask = masks.loss_mask(trajectory.source, params.loss_mask)
    critic_mask = estimated.critic_mask[i, :length]
    return Credit(
        trajectory_id=trajectory.trajectory_id,
        return_=float(batch.rewards[i].sum()),
        advantages=advantages,
        values=values.astype(np.float32),
        value_targets=estimated.value_targets[i, :length].astype(np.float32),
        reference_logprobs=np.zeros(length, np.float32) if reference is None else np.where(loss_mask, reference, 0),
        loss_mask=loss_mask,
        critic_mask=critic_mask,
        kept=bool(advantages[loss_mask].any() or critic_mask.any() or (regularised and loss_mask.any())),
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
