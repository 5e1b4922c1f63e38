"""The frozen reference: the policy as it was before reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from agent_r1.policy.adapter import detached
from agent_r1.policy.learner import Learner
from agent_r1.policy.model import load_policy
from agent_r1.policy.scoring import Compute, Floats, Mask, logprobs
from agent_r1.records import Trajectory


class Reference:
    """A policy that is never trained, to measure how far another one has gone from it."""

    def __init__(self, policy: PreTrainedModel, compute: Compute) -> None:
        """Its `policy` may have adapters, which are left out wherever the reference is asked."""
        self.policy = policy
        self.compute = compute

    def logprobs(self, trajectories: Sequence[Trajectory], masks: Sequence[Mask]) -> list[Floats]:
        """Its logprob in nats of every masked token: [L] per trajectory, 0 elsewhere; never of a context's first."""
        with detached(self.policy):
            return logprobs(self.policy, trajectories, masks, self.compute)


def reference_of(learner: Learner, path: str | Path) -> Reference:
    """What a learner started from: its own policy without the adapters, or else a copy, in the compute dtype.

    Args:
        path: the Hugging Face folder or hub id that the learner was given.

    Raises:
        ValueError: no model at `path`.
    """
    return Reference(learner.policy, learner.compute) if learner.adapter else frozen(path, learner.compute)


def frozen(path: str | Path, compute: Compute) -> Reference:
    """The model of a Hugging Face folder or hub id, in the compute dtype.

    Raises:
        ValueError: no model at `path`.
    """
    return Reference(load_policy(path, compute.dtype, compute.device).requires_grad_(False), compute)
