"""Which trajectories go through a model together, and what the model says about them. Everything here is deterministic.

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
from agent_r1.params.update import CriticParams, UpdateParams
from agent_r1.records import Trajectory
from agent_r1.seeds import derive

Mask = NDArray[np.bool_]
Floats32 = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Where and how a model runs."""

    device: torch.device
    dtype: torch.dtype  # of the matrix products; weights are float32
    max_tokens: int  # of a micro-batch, padding included
    packed: bool = False  # whether there is no padding, see `packing`
    float32_output: bool = False  # of the output layer, where the others compute in bfloat16
    ranks: Ranks = ALONE

    def deal(self, lengths: Sequence[Sequence[int]]) -> list[tuple[list[int], bool]]:
        """This rank's packs, as `deal` says."""
        ranks = self.ranks
        return deal(lengths, self.max_tokens, packed=self.packed, rank=ranks.rank, ranks=ranks.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Trajectories that go through a model together, and which of their tokens are asked for."""

    rows: list[int]  # [R] indices into the trajectories that were batched
    masks: list[Mask]  # [R] of [L]
    ids: Tensor  # [B, T] int64, right-padded; no context sees another
    mask: Tensor  # [B, T] bool, false on padding
    idle: bool = False  # whether it repeats what another rank has, because this one has none left and all take turns

    def take(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """The entries [N] at the selected tokens, in the order of `ids[mask]`, of arrays [L] of all trajectories."""
        chosen = [arrays[row][mask] for row, mask in zip(self.rows, self.masks, strict=True)]
        return torch.from_numpy(np.concatenate(chosen)).to(self.ids.device)

    def split(self, entries: Tensor) -> list[Tensor]:
        """Takes entries [N] apart again: [R], one piece per trajectory."""
        return list(torch.split(entries, [int(mask.sum()) for mask in self.masks]))

    def cut(self, sizes: Sequence[int]) -> Iterator[MicroBatch]:
        """The same trajectories with so many of their tokens after the other; `ids` and `mask` stay the whole one's."""
        lengths = [len(mask) for mask in self.masks]
        numbers = np.split(np.cumsum(np.concatenate(self.masks)), np.cumsum(lengths)[:-1])  # of the tokens, from 1 on
        for stop, size in zip(np.cumsum(sizes), sizes, strict=True):
            pairs = zip(self.masks, numbers, strict=True)
            yield replace(self, masks=[mask & (stop - size < number) & (number <= stop) for mask, number in pairs])


def minibatches(
    count: int, params: UpdateParams | CriticParams, *, seed: int, iteration: int
) -> Iterator[NDArray[np.int64]]:
    """Splits `range(count)` in each of the `epochs` into `minibatches` random sets, one for every optimiser step.

    They are of nearly equal size. A ValueError refuses fewer trajectories than sets.
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
    """This rank's trajectories in micro-batches within `compute.max_tokens`, as many as every other rank has.

    One whose mask [L] selects no token is in none.
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
    """The packs of one of some ranks, which take turns, and whether it idles; arguments as in `pack_by_length`.

    All ranks have as many turns, and find the same packs from the lengths alone. The budget is the smallest that takes
    no more turns, so that the packs of a turn are nearly alike. A rank that a turn leaves without one idles with the
    shortest trajectory, which another rank has too.
    """
    share_out = pack_tightly if packed else pack_by_length
    packs = share_out(lengths, max_tokens)
    if ranks == 1:
        return [(pack, False) for pack in packs]
    turns, least = -(-len(packs) // ranks), 0
    while max_tokens - least > 1:  # the one is enough, the other too little
        middle = (least + max_tokens) // 2
        tried = share_out(lengths, middle)
        packs, least, max_tokens = (packs, middle, max_tokens) if len(tried) > turns * ranks else (tried, least, middle)
    shortest = min(range(len(lengths)), key=lambda index: max(lengths[index]), default=0)
    places = range(rank, turns * ranks, ranks)
    return [(packs[place], False) if place < len(packs) else ([shortest], True) for place in places]


def pack_by_length(lengths: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Packs trajectories of similar length so that a pack, its contexts padded to the longest, keeps to a budget.

    The packs hold indices into `lengths`, the tokens of each context of each trajectory; a trajectory's contexts stay
    together, and one beyond the budget gets a pack of its own. The longest come first, so that too large a budget fails
    at once.
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
    """The same where nothing is padded, so that long and short may share a pack: each goes into the first with room."""
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
    """Rows of different lengths as one tensor [B, T], zeros on the right.

    With causal attention no real token sees the padding, so a model needs no attention mask for the result; leaving
    the mask out keeps the fast attention kernel.
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

    Never ask for the first token of a context: nothing predicts it.
    """
    scorer = partial(token_logprobs, policy, backbone=compute.ranks.backbone(policy))
    scores = score(scorer, trajectories, masks, compute)
    compute.ranks.let_go(policy)
    return scores


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
