"""The numbers of one iteration that credit assignment sees, named `part/what`. Means are over trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit.filters import Selection
from agent_r1.credit.group import group_statistics
from agent_r1.credit.rewards import PARTS, Rewards
from agent_r1.params import FilterParams
from agent_r1.records import CallStatus, Credit, Outcome, Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """How the episodes went. An episode without an answer scores 0; the share of valid calls is 0 without a call."""
    calls = [step.call_status for t in trajectories for step in t.steps if step.call_status is not CallStatus.NONE]
    return {
        "rollout/em": _mean([_fact(t, "em") for t in trajectories]),
        "rollout/f1": _mean([_fact(t, "f1") for t in trajectories]),
        "rollout/steps": _mean([len(t.steps) for t in trajectories]),
        "rollout/tool_calls": len(calls) / len(trajectories),
        "rollout/valid_call_share": calls.count(CallStatus.OK) / max(len(calls), 1),
        "rollout/answered_share": _mean([t.outcome is Outcome.ANSWERED for t in trajectories]),
        "rollout/tokens": _mean([len(t.token_ids) for t in trajectories]),
        "rollout/action_tokens": _mean([int(t.action_mask.sum()) for t in trajectories]),
    }


def reward_metrics(
    totals: Sequence[Rewards], parts: Sequence[dict[str, Rewards]], groups: NDArray[np.int64]
) -> dict[str, float]:
    """Every part unweighted; of the returns the mean, the highest, the sample std, and its mean over groups."""
    returns = np.array([total.sum() for total in totals])
    _, stds, sizes = group_statistics(returns, groups)
    _, [std, *_], _ = group_statistics(returns, np.zeros_like(groups))
    return {
        **{f"reward/{name}": _mean([part[name].sum() for part in parts]) for name in PARTS},
        "reward/total": _mean(returns),
        "reward/max": float(returns.max()),
        "reward/std": float(std),
        "reward/std_in_groups": float((stds / sizes).sum() / len(np.unique(groups))),
    }


def filter_metrics(selection: Selection, params: FilterParams) -> dict[str, float]:
    """The share of groups that a filter keeps and the smallest std among them; nothing without a filter."""
    if params.kind == "none":
        return {}
    return {"filter/kept_share": selection.share, "filter/std_threshold": selection.threshold}


def advantage_metrics(trajectories: Sequence[Trajectory], credits_: Sequence[Credit]) -> dict[str, float]:
    """Over the action tokens of all trajectories that are kept, as the loss sees them; nothing where none is."""
    rows = [(t, credit) for t, credit in zip(trajectories, credits_, strict=True) if credit.kept]
    if not rows:
        return {}
    advantages = np.concatenate([credit.advantages[t.action_mask] for t, credit in rows]).astype(np.float64)
    return {
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std()),
        "advantage/abs_max": float(np.abs(advantages).max()),
    }


def value_metrics(credits_: Sequence[Credit]) -> dict[str, float]:
    """The share of the value targets' variance that the values explain, over the critic mask.

    Nothing without a critic or without a trajectory that is kept; 0 where all targets are equal.
    """
    targets = np.concatenate([credit.value_targets[credit.critic_mask] for credit in credits_]).astype(np.float64)
    values = np.concatenate([credit.values[credit.critic_mask] for credit in credits_])
    if not len(targets):
        return {}
    variance = targets.var()
    explained = 1 - (targets - values).var() / variance if variance else 0.0
    return {"value/explained_variance": float(explained)}


def _fact(trajectory: Trajectory, name: str) -> float:
    return trajectory.steps[-1].rewards.get(name, 0.0) if trajectory.steps else 0.0


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    return float(np.mean(values))
