"""The frozen reference: the policy as it was before reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from agent_r1.params import UpdateParams
from agent_r1.policy.model import DtypeName, compute_dtype, default_device, load_policy
from agent_r1.policy.scoring import Compute, Floats, Mask, logprobs
from agent_r1.records import Trajectory


class Reference:
    """A policy that is never trained, to measure how far another one has gone from it."""

    def __init__(
        self,
        path: str | Path,
        params: UpdateParams,
        *,
        dtype: DtypeName = "auto",
        device: torch.device | None = None,
    ) -> None:
        """Loads a Hugging Face folder or hub id, on the accelerator where there is one.

        Raises:
            ValueError: no model at `path`.
        """
        device = device or default_device()
        self.compute = Compute(
            device=device, dtype=compute_dtype(dtype, device), max_tokens=params.max_tokens_per_microbatch
        )
        self.policy = load_policy(path, device=device).requires_grad_(False)

    def logprobs(self, trajectories: Sequence[Trajectory], masks: Sequence[Mask]) -> list[Floats]:
        """Its logprob in nats of every masked token: [L] per trajectory, 0 elsewhere; never of the first token."""
        return logprobs(self.policy, trajectories, masks, self.compute)
