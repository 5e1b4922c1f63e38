"""The frozen reference: a policy that is never trained, from which it is measured how far another one has gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from agent_r1.learn import adapter
from agent_r1.learn.batching import Compute, Floats32, Mask, score_logprobs
from agent_r1.learn.model import load_policy
from agent_r1.learn.output import compute_output_in_float32
from agent_r1.records import Trajectory


@dataclass(frozen=True, slots=True)
class Reference:
    """A policy that is never trained; its adapters are left out."""

    policy: PreTrainedModel
    compute: Compute

    def logprobs(self, trajectories: Sequence[Trajectory], masks: Sequence[Mask]) -> list[Floats32]:
        """Its logprob in nats of every masked token: [L] per trajectory, 0 elsewhere; never of a context's first."""
        with adapter.detached(self.policy):
            return score_logprobs(self.policy, trajectories, masks, self.compute)


def frozen(path: str | Path, compute: Compute) -> Reference:
    """The model of a Hugging Face folder or hub id, in the compute dtype; raises as `load_policy`."""
    device = compute.ranks.loads_on(compute.device)
    policy = load_policy(path, compute.dtype, device, packed=compute.packed).requires_grad_(False)
    if compute.float32_output:
        compute_output_in_float32(policy)
    compute.ranks.share_out(policy)
    return Reference(policy, compute)
