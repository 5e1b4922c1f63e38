"""The scores that models give to the tokens of trajectories, a micro-batch at a time. Everything here is deterministic.

The output layer runs on selected tokens alone, and not on all of them at once. Legend for shapes: R = trajectories of a
micro-batch, B = their contexts, each a row of its own, T = the longest context, N = selected tokens of all
trajectories, n = tokens of a chunk, V = the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agent_r1.devices.sharing import ALONE, Ranks
from agent_r1.learn import losses
from agent_r1.learn.model import is_packed, precision, see, shares_prefixes
from agent_r1.learn.prefixes import Neighbours
from agent_r1.params.stages import ModelParams
from agent_r1.params.train import CriticParams, UpdateParams
from agent_r1.pretrained import compute_dtype
from agent_r1.records import Floats32, Int32s, Mask, Trajectory
from agent_r1.seeds import derive

T = TypeVar("T")

CHUNK = 2**25  # logits that exist at a time on a CPU: 128 MiB
BLOCK = 2**20  # logits that become logprobs at a time on a CPU, so few that they stay in its cache
LEAST = torch.finfo(torch.float32).min  # for -inf, which times 0 is no number
ON_CUDA = 4, 16  # times as many chunks and blocks: a GPU waits for the launches of smaller ones


def room(kind: str) -> tuple[int, int]:
    """The logits that exist at a time on a kind of device, and those that become logprobs at a time."""
    chunks, blocks = ON_CUDA if kind == "cuda" else (1, 1)
    return CHUNK * chunks, BLOCK * blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """The device, precision and micro-batch size that a model runs with."""

    device: torch.device
    dtype: torch.dtype  # of the matrix products; weights are float32
    max_tokens: int  # of a micro-batch, padding included
    packed: bool = False  # whether contexts are packed without padding
    shares: bool = False  # whether packed contexts share what they begin with
    scale: float = 1.0  # of a loss; its gradient is divided by it
    float32_output: bool = False  # whether the output layer computes in float32 while the others use bfloat16
    ranks: Ranks = ALONE

    def of(self, model: PreTrainedModel) -> Compute:
        """The same for a model, which may read packed contexts, and compute once what they share."""
        return replace(self, packed=is_packed(model.config), shares=shares_prefixes(model.config))

    def deal(self, rows: Sequence[Sequence[Int32s]]) -> list[tuple[list[int], bool]]:
        """This rank's packs, from the function `deal`, of trajectories with the token ids of each of their contexts."""
        ranks = self.ranks
        neighbours = Neighbours.of([contexts[0] for contexts in rows]) if self.shares else None
        lengths = [[*map(len, contexts)] for contexts in rows]
        return deal(lengths, self.max_tokens, self.packed, neighbours, rank=ranks.rank, ranks=ranks.size)


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
    last: bool = True  # whether no other one follows
    idle: bool = False  # whether it repeats another rank's, because this one has none left and all take turns

    def take(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """Takes the entries [N] at the selected tokens, ordered as `ids[mask]`, from arrays [L] of all trajectories."""
        entries = [arrays[row][mask] for row, mask in zip(self.rows, self.masks, strict=True)]
        return torch.from_numpy(np.concatenate(entries)).to(self.ids.device)

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
    rows: Sequence[T], params: UpdateParams | CriticParams, *, seed: int, iteration: int
) -> Iterator[list[T]]:
    """Splits rows in each of the `epochs` into `minibatches` random sets, one for every optimiser step.

    Their sizes differ by 1 at most. No rows make no step. Where a filter and the world leave fewer rows than sets, each
    row is a set.
    """
    if not rows:
        return
    for epoch in range(params.epochs):
        order = np.random.default_rng(derive(seed, iteration, epoch)).permutation(len(rows))
        for indices in np.array_split(order, min(params.minibatches, len(rows))):
            yield [rows[index] for index in indices]


def micro_batches(trajectories: Sequence[Trajectory], masks: Sequence[Mask], compute: Compute) -> Iterator[MicroBatch]:
    """Splits this rank's trajectories into micro-batches of up to `compute.max_tokens`; every rank has as many.

    A trajectory whose mask [L] selects no token is left out.
    """
    indices = [index for index, mask in enumerate(masks) if mask.any()]
    deals = compute.deal(
        [[trajectories[index].token_ids[span] for span in trajectories[index].contexts] for index in indices]
    )
    for turn, (group, idle) in enumerate(deals, 1):
        rows = [indices[index] for index in group]
        contexts = [(row, span) for row in rows for span in trajectories[row].contexts]
        yield MicroBatch(
            rows=rows,
            masks=[masks[row] for row in rows],
            ids=pad([trajectories[row].token_ids[span] for row, span in contexts], torch.long).to(compute.device),
            mask=pad([masks[row][span] for row, span in contexts], torch.bool).to(compute.device),
            last=turn == len(deals),
            idle=idle,
        )


def deal(
    lengths: Sequence[Sequence[int]],
    max_tokens: int,
    packed: bool = False,
    neighbours: Neighbours | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> list[tuple[list[int], bool]]:
    """The packs of one rank, one for each turn, and whether it idles in that turn. Arguments as in `pack_by_length`.

    All ranks take the same number of turns, and find the same packs from the lengths alone, and from the `neighbours`
    where packed contexts share what they begin with. The budget is the smallest that needs no more turns, so that the
    packs of a turn are nearly equal. A rank without a pack in the last turn idles with the shortest trajectory, whose
    results are dropped.
    """

    def share_out(most: int) -> list[list[int]]:
        if neighbours:
            return neighbours.packs([*map(sum, lengths)], most)
        return pack_tightly(lengths, most) if packed else pack_by_length(lengths, most)

    packs = share_out(max_tokens)
    if ranks == 1:
        return [(pack, False) for pack in packs]
    turns = -(-len(packs) // ranks)
    least = 0
    while max_tokens - least > 1:  # `max_tokens` is enough, `least` is too little
        middle = (least + max_tokens) // 2
        tried = share_out(middle)
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
    packs = list[list[int]]()
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
    packs = list[list[int]]()
    sizes = list[int]()
    for index in sorted(range(len(lengths)), key=lambda index: (-sum(lengths[index]), index)):
        tokens = sum(lengths[index])
        place = next((number for number, size in enumerate(sizes) if size + tokens <= max_tokens), len(packs))
        if place == len(packs):
            packs.append([])
            sizes.append(0)
        packs[place].append(index)
        sizes[place] += tokens
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
    """The logprob in nats of every masked token: [L] per trajectory, 0 elsewhere. None may be a context's first."""
    scorer = partial(token_logprobs, policy, backbone=compute.ranks.backbone(policy))
    scores = score(scorer, trajectories, masks, compute)
    compute.ranks.let_go(policy)
    return scores


@dataclass(frozen=True, slots=True)
class Output:
    """The output layer of a model on selected tokens, whose contexts its backbone has read.

    The layer is the costly part of a small model with a large vocabulary. It therefore runs on the selected tokens
    alone, and on chunks whose logits keep to `room`. The model itself processes its logits further, such as by the
    scales of Granite and Cohere and the soft cap of Gemma.
    """

    model: PreTrainedModel
    seen: Any  # the backbone's output
    hidden: Tensor  # [N, hidden size] the states that predict the tokens
    chosen: Tensor  # [N] the tokens
    balance: Tensor  # [] of experts, from `losses.balance`; 0 without any

    def scores(self, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """The tokens' logprobs [N], and the `entropy` [N] of the distributions that predict them or 0, in nats.

        The backward pass of several chunks computes the logits of each one again.
        """
        if self._chunks == 1:
            return self._scores_of(self.hidden, self.chosen, entropy)
        scores = [checkpoint(self._scores_of, *chunk, entropy, use_reentrant=False) for chunk in self._split()]
        logprobs, entropies = zip(*scores, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def cut(self) -> list[Output]:
        """Splits the tokens into parts of a chunk each, so that nothing is computed twice.

        Several parts are detached from the backbone: call backward on each part's loss, then `join` all of them.
        """
        if self._chunks == 1:
            return [self]
        learn = self.hidden.requires_grad
        balance = self.balance.detach().requires_grad_(learn)
        return [
            replace(self, hidden=hidden.detach().requires_grad_(learn), chosen=tokens, balance=balance)
            for hidden, tokens in self._split()
        ]

    def join(self, parts: Sequence[Output]) -> None:
        """Takes the gradients of the parts of `cut` back through the backbone."""
        if parts[0] is self:
            return
        gradients = {self.hidden: torch.cat([cast(Tensor, part.hidden.grad) for part in parts])}
        if (balance := parts[0].balance.grad) is not None:
            gradients[self.balance] = balance
        torch.autograd.backward([*gradients], [*gradients.values()])

    @property
    def _chunks(self) -> int:
        words = int(self.model.get_output_embeddings().weight.shape[0])
        chunk, _ = room(self.hidden.device.type)
        return max(1, -(-len(self.chosen) * words // chunk))

    def _split(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*(tensor.tensor_split(self._chunks) for tensor in (self.hidden, self.chosen)), strict=True)

    def _scores_of(self, hidden: Tensor, tokens: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        backbone = self.model.get_decoder()
        output = replace(self.seen, last_hidden_state=hidden.unsqueeze(0))
        backbone.forward = lambda *_args, **_kwargs: output  # so that the model computes the output layer alone
        try:
            # `forward`, because the hooks of ranks around a call are for all chunks at once
            logits: Tensor = self.model.forward(input_ids=tokens[None, :1], use_cache=False).logits.squeeze(0)
        finally:
            del backbone.forward
        if len(logits) != len(tokens):
            raise ValueError(
                f"{type(self.model).__name__} does not go on from what its get_decoder() says; take another"
            )
        scores: tuple[Tensor, Tensor] = TokenScores.apply(logits.float(), tokens, entropy)  # type: ignore[no-untyped-call]
        return scores


def output_of(model: PreTrainedModel, ids: Tensor, mask: Tensor, backbone: nn.Module | None = None) -> Output:
    """Runs the backbone on right-padded ids [B, T], and selects tokens by the mask [B, T].

    A `backbone` is called in place of the model's own. A ValueError refuses a mask that selects the first token of a
    row, which nothing predicts.
    """
    if mask[:, 0].any():
        raise ValueError("the mask selects the first token of a row, which nothing predicts; leave it out")
    output, hidden = see(backbone or model.get_decoder(), ids, mask, model.config)
    routers = output.get("router_logits")
    balance = losses.balance(routers, model.config.num_experts_per_tok) if routers else hidden.new_zeros(())
    return Output(model, output, hidden, ids[mask], balance)


def token_logprobs(model: PreTrainedModel, ids: Tensor, mask: Tensor, backbone: nn.Module | None = None) -> Tensor:
    """The logprobs [N] in nats of the selected tokens; arguments as in `output_of`."""
    return output_of(model, ids, mask, backbone).scores(entropy=False)[0]


class TokenScores(torch.autograd.Function):
    """The logprobs [n] of tokens [n] from logits [n, V], and the `entropy` [n] of the distributions or 0, in nats.

    These and their gradients are those of log_softmax, to the bit. They are computed a few rows at a time, which keeps
    the intermediate tensors [n, V] small. The logprobs overwrite the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        entropies = logits.new_zeros(len(logits))
        for block, rows, logprobs, part in _blocks(logits):
            torch.log_softmax(block, -1, out=logprobs)
            block.copy_(logprobs)
            if entropy:  # a token of probability 0 adds 0
                entropies[rows] = -torch.exp(block, out=part).mul_(logprobs.clamp_(min=LEAST)).sum(-1)
        ctx.save_for_backward(logits, tokens)
        return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor, None, None]:
        logprobs, tokens = ctx.saved_tensors
        result = torch.empty_like(logprobs)
        entropy = bool(of_entropies.any())
        for block, rows, gradient, part in _blocks(logprobs):
            if entropy:
                slope = torch.add(block, 1, out=part).clamp_(min=LEAST)
                torch.exp(block, out=gradient).mul_(slope).mul_(-of_entropies[rows, None])
            else:
                gradient.zero_()
            gradient.scatter_add_(-1, tokens[rows, None], of_logprobs[rows, None])
            torch.ops.aten._log_softmax_backward_data.out(gradient, block, -1, block.dtype, out=result[rows])
        return result, None, None


def _blocks(logits: Tensor) -> Iterator[tuple[Tensor, slice, Tensor, Tensor]]:
    """Yields blocks of rows, their slice, and two buffers of their size, which all blocks share."""
    _, block = room(logits.device.type)
    size = max(1, block // logits.shape[-1])
    first, second = (torch.empty_like(logits[:size]) for _ in range(2))
    for start in range(0, len(logits), size):
        rows = logits[start : start + size]
        yield rows, slice(start, start + size), first[: len(rows)], second[: len(rows)]
