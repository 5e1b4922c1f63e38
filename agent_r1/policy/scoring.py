"""What a model says about every asked-for token of some trajectories, without a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.policy.batching import MicroBatch, batches
from agent_r1.policy.model import precision, token_logprobs
from agent_r1.records import Trajectory

Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Where and how a model runs."""

    device: torch.device
    dtype: torch.dtype  # of the matrix products; weights are float32
    max_tokens: int  # of a padded micro-batch


def micro_batches(trajectories: Sequence[Trajectory], masks: Sequence[Mask], compute: Compute) -> Iterator[MicroBatch]:
    """The trajectories in micro-batches; those without an asked-for token are in none."""
    return batches(trajectories, masks, max_tokens=compute.max_tokens, device=compute.device)


def scores(
    score: Callable[[Tensor, Tensor], Tensor],
    trajectories: Sequence[Trajectory],
    masks: Sequence[Mask],
    compute: Compute,
) -> list[Floats]:
    """What `score(ids [B, T], mask [B, T]) -> [N]` gives for the masked tokens: [L] per trajectory, 0 elsewhere."""
    results = [np.zeros(len(mask), np.float32) for mask in masks]
    with torch.no_grad(), precision(compute.device, compute.dtype):
        for batch in micro_batches(trajectories, masks, compute):
            pieces = batch.split(score(batch.ids, batch.mask).cpu())
            for row, mask, piece in zip(batch.rows, batch.masks, pieces, strict=True):
                results[row][mask] = piece.numpy()
    return results


def logprobs(
    policy: PreTrainedModel, trajectories: Sequence[Trajectory], masks: Sequence[Mask], compute: Compute
) -> list[Floats]:
    """The logprob in nats of every masked token: [L] per trajectory, 0 elsewhere.

    Never ask for the first token of a context: nothing predicts it.
    """
    return scores(lambda ids, mask: token_logprobs(policy, ids, mask), trajectories, masks, compute)
