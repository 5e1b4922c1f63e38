"""Two credits of the same trajectories held against each other, and a critic's values against what came.

Observation tokens are here all tokens after the first prompt that the policy did not sample, template text included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit import masks
from agent_r1.credit.collate import token_rewards
from agent_r1.credit.rewards import step_rewards
from agent_r1.params import RewardWeights
from agent_r1.records import Credit, Trajectory

Floats = NDArray[np.float64]


def advantage_comparison(
    trajectories: Sequence[Trajectory], credits_: Sequence[Credit], others: Sequence[Credit]
) -> dict[str, float]:
    """Where advantages act, and how they agree with other credits of the same trajectories.

    Returns:
        `advantage/kept_share`: of the trajectories, those that are kept.
        `advantage/nonzero_share`: of the tokens after the first prompt of all trajectories, kept or not.
        `advantage/correlation`: Pearson's, at the action tokens of the trajectories that both keep; NaN where there
        are none, or where one side is constant.
    """
    after = [masks.after_prompt(trajectory.source) for trajectory in trajectories]
    acting = [
        t.action_mask & one.kept & other.kept for t, one, other in zip(trajectories, credits_, others, strict=True)
    ]
    return {
        "advantage/kept_share": float(np.mean([credit.kept for credit in credits_])),
        "advantage/nonzero_share": float(np.mean(_advantages(credits_, after) != 0)),
        "advantage/correlation": _correlation(_advantages(credits_, acting), _advantages(others, acting)),
    }


def value_errors(
    trajectories: Sequence[Trajectory], credits_: Sequence[Credit], weights: RewardWeights
) -> dict[str, float]:
    """How far the values of the kept trajectories are from the undiscounted return that was yet to come.

    Returns:
        For action and for observation tokens: `value/<tokens>_rmse`, and `value/<tokens>_std` of that return, which
        the best constant would err by; nothing for a kind of token that there is none of.
    """
    errors: dict[str, float] = {}
    kept = [(t, credit) for t, credit in zip(trajectories, credits_, strict=True) if credit.kept]
    to_come = [returns_to_come(trajectory, weights) for trajectory, _ in kept]
    for name in ("action", "observation"):
        chosen = [t.action_mask if name == "action" else masks.after_prompt(t.source) & ~t.action_mask for t, _ in kept]
        values = [credit.values[mask] for (_, credit), mask in zip(kept, chosen, strict=True)]
        returns = [each[mask] for each, mask in zip(to_come, chosen, strict=True)]
        if sum(map(len, returns)):
            target = np.concatenate(returns)
            errors[f"value/{name}_rmse"] = float(np.sqrt(np.mean((np.concatenate(values) - target) ** 2)))
            errors[f"value/{name}_std"] = float(target.std())
    return errors


def returns_to_come(trajectory: Trajectory, weights: RewardWeights) -> Floats:
    """[L] the undiscounted sum of the rewards at a token and after it."""
    rewards = token_rewards(trajectory, step_rewards(trajectory, weights)[0])
    return np.cumsum(rewards[::-1])[::-1]


def _advantages(credits_: Sequence[Credit], chosen: Sequence[masks.Mask]) -> Floats:
    """[N] at the chosen tokens, trajectory after trajectory."""
    return np.concatenate([credit.advantages[mask] for credit, mask in zip(credits_, chosen, strict=True)]).astype(
        np.float64
    )


def _correlation(one: Floats, other: Floats) -> float:
    if not len(one) or not one.std() or not other.std():
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])
