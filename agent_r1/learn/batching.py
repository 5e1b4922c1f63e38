"""Micro-batches of trajectories and the scores that models give them. Everything here is deterministic.

Legend for shapes: R = trajectories of a micro-batch, B = their contexts, each a row of its own, T = the longest
context, N = selected tokens of all trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from agent_r1.devices.ranks import ALONE, Ranks
from agent_r1.learn import adapter
from agent_r1.learn.model import load_policy, precision
from agent_r1.learn.output import compute_output_in_float32, token_logprobs
from agent_r1.params.stages import ModelParams
from agent_r1.params.update import CriticParams, UpdateParams
from agent_r1.pretrained import compute_dtype
from agent_r1.records import Trajectory
from agent_r1.seeds import derive

Mask = NDArray[np.bool_]
Floats32 = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """The device, precision and micro-batch size that a model runs with."""

    device: torch.device
    dtype: torch.dtype  # of the matrix products; weights are float32
    max_tokens: int  # of a micro-batch, padding included
    packed: bool = False  # whether contexts are packed without padding
    float32_output: bool = False  # whether the output layer computes in float32 while the others use bfloat16
    ranks: Ranks = ALONE

    def deal(self, lengths: Sequence[Sequence[int]]) -> list[tuple[list[int], bool]]:
        """This rank's packs, from the function `deal`."""
        ranks = self.ranks
        return deal(lengths, self.max_tokens, packed=self.packed, rank=ranks.rank, ranks=ranks.size)


def compute_of(model: ModelParams, params: UpdateParams, device: torch.device, ranks: Ranks = ALONE) -> Compute:
    """The device, precision and micro-batch size of a learner."""
    dtype = compute_dtype(model.dtype, device)
    return Compute(
        device=device,
        dtype=dtype,
        max_tokens=params.max_tokens_per_microbatch,
        packed=model.packing,
        float32_output=model.float32_output and dtype is not torch.float32,
        ranks=ranks,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Trajectories that go through a model together, and a mask of the selected tokens."""

    rows: list[int]  # [R] indices into the trajectories that were batched
    masks: list[Mask]  # [R] of [L]
    ids: Tensor  # [B, T] int64, right-padded; no context sees another
    mask: Tensor  # [B, T] bool, false on padding
    idle: bool = False  # whether it repeats another rank's, because this one has none left and all take turns

    def take(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """Takes the entries [N] at the selected tokens, ordered as `ids[mask]`, from arrays [L] of all trajectories."""
        chosen = [arrays[row][mask] for row, mask in zip(self.rows, self.masks, strict=True)]
        return torch.from_numpy(np.concatenate(chosen)).to(self.ids.device)

    def split(self, entries: Tensor) -> list[Tensor]:
        """Splits entries [N] into one piece for each of the R trajectories."""
        return list(torch.split(entries, [int(mask.sum()) for mask in self.masks]))

    def cut(self, sizes: Sequence[int]) -> Iterator[MicroBatch]:
        """Splits the selected tokens into consecutive chunks of `sizes`; every chunk keeps `ids` and `mask`."""
        lengths = [len(mask) for mask in self.masks]
        numbers = np.split(np.cumsum(np.concatenate(self.masks)), np.cumsum(lengths)[:-1])  # from 1
        for stop, size in zip(np.cumsum(sizes), sizes, strict=True):
            pairs = zip(self.masks, numbers, strict=True)
            yield replace(self, masks=[mask & (stop - size < number) & (number <= stop) for mask, number in pairs])


def minibatches(
    count: int, params: UpdateParams | CriticParams, *, seed: int, iteration: int
) -> Iterator[NDArray[np.int64]]:
    """Splits `range(count)` in each of the `epochs` into `minibatches` random sets, one for every optimiser step.

    Their sizes differ by 1 at most. A ValueError refuses fewer trajectories than sets.
    """
    if count < params.minibatches:
        raise ValueError(
            f"minibatches {params.minibatches} splits {count} trajectories into empty parts; lower it in "
            f"train.update{'.critic' * isinstance(params, CriticParams)}, or raise rollout.questions"
        )
    for epoch in range(params.epochs):
        order = np.random.default_rng(derive(seed, iteration, epoch)).permutation(count)
        yield from np.array_split(order, params.minibatches)


def micro_batches(trajectories: Sequence[Trajectory], masks: Sequence[Mask], compute: Compute) -> Iterator[MicroBatch]:
    """Splits this rank's trajectories into micro-batches of up to `compute.max_tokens`; every rank has as many.

    A trajectory whose mask [L] selects no token is left out.
    """
    asked = [index for index, mask in enumerate(masks) if mask.any()]
    lengths = [[span.stop - span.start for span in trajectories[index].contexts] for index in asked]
    for group, idle in compute.deal(lengths):
        rows = [asked[position] for position in group]
        contexts = [(row, span) for row in rows for span in trajectories[row].contexts]
        yield MicroBatch(
            rows=rows,
            masks=[masks[row] for row in rows],
            ids=pad([trajectories[row].token_ids[span] for row, span in contexts], torch.long).to(compute.device),
            mask=pad([masks[row][span] for row, span in contexts], torch.bool).to(compute.device),
            idle=idle,
        )


def deal(
    lengths: Sequence[Sequence[int]], max_tokens: int, *, packed: bool = False, rank: int = 0, ranks: int = 1
) -> list[tuple[list[int], bool]]:
    """The packs of one rank, one for each turn, and whether it idles in that turn. Arguments as in `pack_by_length`.

    All ranks take the same number of turns, and find the same packs from the lengths alone. The budget is the smallest
    that needs no more turns, so that the packs of a turn are nearly equal. A rank without a pack in the last turn idles
    with the shortest trajectory, whose results are dropped.
    """
    share_out = pack_tightly if packed else pack_by_length
    packs = share_out(lengths, max_tokens)
    if ranks == 1:
        return [(pack, False) for pack in packs]
    turns, least = -(-len(packs) // ranks), 0
    while max_tokens - least > 1:  # `max_tokens` is enough, `least` is too little
        middle = (least + max_tokens) // 2
        tried = share_out(lengths, middle)
        packs, least, max_tokens = (packs, middle, max_tokens) if len(tried) > turns * ranks else (tried, least, middle)
    shortest = min(range(len(lengths)), key=lambda index: max(lengths[index]), default=0)
    places = range(rank, turns * ranks, ranks)
    return [(packs[place], False) if place < len(packs) else ([shortest], True) for place in places]


def pack_by_length(lengths: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Packs trajectories of similar length, so that a pack with its contexts padded to the longest keeps to a budget.

    The packs hold indices into `lengths`, the tokens of each context of each trajectory. The contexts of a trajectory
    stay together, and a trajectory beyond the budget gets a pack of its own. The longest come first, so that too large
    a budget fails at once.
    """
    packs: list[list[int]] = []
    width, height = 0, 0  # of the pack being filled
    for index in sorted(range(len(lengths)), key=lambda index: (-max(lengths[index]), index)):
        height += len(lengths[index])
        if packs and height * width <= max_tokens:
            packs[-1].append(index)
        else:
            packs.append([index])
            width, height = max(lengths[index]), len(lengths[index])
    return packs


def pack_tightly(lengths: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Packs trajectories without padding: each one, the longest first, goes into the first pack with room."""
    packs, taken = list[list[int]](), list[int]()
    for index in sorted(range(len(lengths)), key=lambda index: (-sum(lengths[index]), index)):
        tokens = sum(lengths[index])
        found = next((at for at, there in enumerate(taken) if there + tokens <= max_tokens), len(packs))
        if found == len(packs):
            packs.append([])
            taken.append(0)
        packs[found].append(index)
        taken[found] += tokens
    return packs


def pad(rows: Sequence[NDArray[Any]], dtype: torch.dtype) -> Tensor:
    """Joins rows of different lengths into a tensor [B, T] with zeros on the right.

    No real token sees the padding under causal attention. The result therefore needs no attention mask, and keeps the
    fast attention kernel.
    """
    # `tensor` copies: rows read from Parquet are read-only
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def score(
    scorer: Callable[[Tensor, Tensor], Tensor],
    trajectories: Sequence[Trajectory],
    masks: Sequence[Mask],
    compute: Compute,
) -> list[Floats32]:
    """Applies `scorer(ids [B, T], mask [B, T]) -> [N]` to the masked tokens: [L] per trajectory, 0 elsewhere."""
    results = [np.zeros(len(mask), np.float32) for mask in masks]
    with torch.no_grad(), precision(compute.device, compute.dtype):
        for batch in micro_batches(trajectories, masks, compute):
            pieces = batch.split(scorer(batch.ids, batch.mask).cpu())
            for row, mask, piece in zip(batch.rows, batch.masks, pieces, strict=True):
                if not batch.idle:
                    results[row][mask] = piece.numpy()
    return compute.ranks.join(results)


def score_logprobs(
    policy: PreTrainedModel, trajectories: Sequence[Trajectory], masks: Sequence[Mask], compute: Compute
) -> list[Floats32]:
    """The logprob in nats of every masked token: [L] per trajectory, 0 elsewhere.

    No mask may select the first token of a context: nothing predicts it.
    """
    scorer = partial(token_logprobs, policy, backbone=compute.ranks.backbone(policy))
    scores = score(scorer, trajectories, masks, compute)
    compute.ranks.let_go(policy)
    return scores


@dataclass(frozen=True, slots=True)
class Reference:
    """A policy that is never trained. Its adapters are left out."""

    policy: PreTrainedModel
    compute: Compute

    def logprobs(self, trajectories: Sequence[Trajectory], masks: Sequence[Mask]) -> list[Floats32]:
        """The logprobs of the masked tokens; see `score_logprobs`."""
        with adapter.detached(self.policy):
            return score_logprobs(self.policy, trajectories, masks, self.compute)


def load_for(path: str | Path, dtype: torch.dtype, compute: Compute) -> PreTrainedModel:
    """The policy at `path` with weights in `dtype`, ready to compute, but not yet sharded. Raises as `load_policy`."""
    policy = load_policy(path, dtype, compute.ranks.loads_on(compute.device), packed=compute.packed)
    if compute.float32_output:
        compute_output_in_float32(policy)
    return policy


def frozen(path: str | Path, compute: Compute) -> Reference:
    """The policy at `path` as a reference, in the compute dtype. Raises as `load_policy`."""
    policy = load_for(path, compute.dtype, compute).requires_grad_(False)
    compute.ranks.share_out(policy)
    return Reference(policy, compute)
