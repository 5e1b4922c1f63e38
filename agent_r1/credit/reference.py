"""What a frozen reference policy says about an iteration: a price for leaving it, and how far away the policy is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agent_r1.records import Trajectory

Floats = NDArray[np.float64]


def kl_rewards(trajectory: Trajectory, reference: NDArray[np.float32]) -> Floats:
    """[L] reference logprob - sampler's logprob at action tokens, 0 elsewhere; nats, before the coefficient.

    Its expectation under the policy is -KL(policy || reference): the estimate k1, the only one of the usual three
    whose gradient through the reward is that of the divergence.

    Args:
        trajectory: of L tokens.
        reference: [L] the reference's logprobs in nats; read at action tokens only.

    Raises:
        ValueError: a logprob at an action token is not finite; names the trajectory.

    Source: Ouyang et al. 2022 (arXiv 2203.02155), Eq. 2; k1: Schulman 2020, joschu.net/blog/kl-approx.html.
    """
    assert len(reference) == len(trajectory.token_ids), f"{trajectory.trajectory_id}: {len(reference)} logprobs"
    difference = reference.astype(np.float64) - trajectory.logprobs
    rewards = np.where(trajectory.action_mask, difference, 0.0)
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"trajectory {trajectory.trajectory_id!r}: a logprob of the sampler or of the reference is not finite; "
            "lower train.update.learning_rate and start again from the checkpoint"
        )
    return rewards


def reference_metrics(trajectories: Sequence[Trajectory], kl: Sequence[Floats]) -> dict[str, float]:
    """The penalty per trajectory, before its coefficient, and the k3 estimate of the KL per action token.

    Args:
        trajectories: of one iteration.
        kl: of each, what `kl_rewards` gives.

    Source: k3: Schulman 2020, joschu.net/blog/kl-approx.html.
    """
    differences = np.concatenate([each[t.action_mask] for t, each in zip(trajectories, kl, strict=True)])
    return {
        "reward/kl": float(np.mean([each.sum() for each in kl])),
        "policy/reference_kl": float(np.mean(np.expm1(differences) - differences)),
    }
