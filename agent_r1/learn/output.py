"""The output layer of a policy: logprobs and entropy of selected tokens, without all their logits at once.

Legend for shapes: B = contexts, T = the longest context, N = selected tokens of all contexts, n = tokens of a chunk,
V = the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agent_r1.learn.model import see

CHUNK = 2**25  # logits that exist at a time on a CPU: 128 MiB
BLOCK = 2**20  # logits that become logprobs at a time on a CPU, so few that they stay in its cache
ON_CUDA = 4, 16  # times as many chunks and blocks: a GPU waits for the launches of smaller ones


def room(kind: str) -> tuple[int, int]:
    """The logits that exist at a time on a kind of device, and those that become logprobs at a time."""
    chunks, blocks = ON_CUDA if kind == "cuda" else (1, 1)
    return CHUNK * chunks, BLOCK * blocks


class Float32Output(nn.Linear):
    """An output layer that computes in float32, whatever the precision of its input and weights.

    Source: MiniMax-M1 (arXiv 2506.13585), where it made sampler and learner agree.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)


def compute_output_in_float32(model: PreTrainedModel) -> None:
    """Replaces a model's output layer by a `Float32Output` of the same weights."""
    layer = model.get_output_embeddings()
    output = Float32Output(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    output.weight, output.bias = layer.weight, layer.bias
    model.set_output_embeddings(output)


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

    def logprobs(self) -> Tensor:
        """The tokens' logprobs [N] in nats."""
        return self.scores(entropy=False)[0]

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
        return [
            replace(self, hidden=hidden.detach().requires_grad_(learn), chosen=chosen)
            for hidden, chosen in self._split()
        ]

    def join(self, parts: Sequence[Output]) -> None:
        """Takes the gradients of the parts of `cut` back through the backbone."""
        if parts[0] is not self:
            self.hidden.backward(torch.cat([cast(Tensor, part.hidden.grad) for part in parts]))

    @property
    def _chunks(self) -> int:
        words = int(self.model.get_output_embeddings().weight.shape[0])
        chunk, _ = room(self.hidden.device.type)
        return max(1, -(-len(self.chosen) * words // chunk))

    def _split(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The states and tokens of each chunk."""
        return zip(*(each.tensor_split(self._chunks) for each in (self.hidden, self.chosen)), strict=True)

    def _scores_of(self, hidden: Tensor, chosen: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        with _answering(self.model.get_decoder(), replace(self.seen, last_hidden_state=hidden.unsqueeze(0))):
            # `forward`, because the hooks of ranks around a call are for all chunks at once
            logits: Tensor = self.model.forward(input_ids=chosen[None, :1], use_cache=False).logits.squeeze(0)
        if len(logits) != len(chosen):
            raise ValueError(
                f"{type(self.model).__name__} does not go on from what its get_decoder() says; take another"
            )
        scores: tuple[Tensor, Tensor] = Scores.apply(logits.float(), chosen, entropy)  # type: ignore[no-untyped-call]
        return scores


def output_of(model: PreTrainedModel, ids: Tensor, mask: Tensor, backbone: nn.Module | None = None) -> Output:
    """Runs the backbone on right-padded ids [B, T], and selects tokens by the mask [B, T].

    A `backbone` is called in place of the model's own. A ValueError refuses a mask that selects the first token of a
    row, which nothing predicts.
    """
    if mask[:, 0].any():
        raise ValueError("the mask selects the first token of a row, which nothing predicts; leave it out")
    seen = see(backbone or model.get_decoder(), ids, mask, model.config)
    return Output(model, seen, seen.last_hidden_state[:, :-1][mask[:, 1:]], ids[mask])


def token_logprobs(model: PreTrainedModel, ids: Tensor, mask: Tensor, backbone: nn.Module | None = None) -> Tensor:
    """The logprobs [N] in nats of the selected tokens; arguments as in `output_of`."""
    return output_of(model, ids, mask, backbone).logprobs()


class Scores(torch.autograd.Function):
    """The logprobs [n] of tokens [n] from logits [n, V], and the `entropy` [n] of the distributions or 0, in nats.

    These and their gradients are those of log_softmax, to the bit. They are computed a few rows at a time, which keeps
    the intermediate tensors [n, V] small. The logprobs overwrite the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, chosen: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        entropies = logits.new_zeros(len(logits))
        for block, rows, logprobs, part in _blocks(logits):
            torch.log_softmax(block, -1, out=logprobs)
            if entropy:
                entropies[rows] = -torch.exp(logprobs, out=part).mul_(logprobs).sum(-1)
            block.copy_(logprobs)
        ctx.save_for_backward(logits, chosen)
        return logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor, None, None]:
        logprobs, chosen = ctx.saved_tensors
        result, entropy = torch.empty_like(logprobs), bool(of_entropies.any())
        for block, rows, given, part in _blocks(logprobs):
            if entropy:
                torch.exp(block, out=given).mul_(torch.add(block, 1, out=part)).mul_(-of_entropies[rows, None])
            else:
                given.zero_()
            given.scatter_add_(-1, chosen[rows, None], of_logprobs[rows, None])
            torch.ops.aten._log_softmax_backward_data.out(given, block, -1, block.dtype, out=result[rows])
        return result, None, None


def _blocks(logits: Tensor) -> Iterator[tuple[Tensor, slice, Tensor, Tensor]]:
    """Yields blocks of rows, their slice, and two buffers of their size, which all blocks share."""
    _, block = room(logits.device.type)
    size = max(1, block // logits.shape[-1])
    one, another = (torch.empty_like(logits[:size]) for _ in range(2))
    for start in range(0, len(logits), size):
        rows = logits[start : start + size]
        yield rows, slice(start, start + size), one[: len(rows)], another[: len(rows)]


@contextmanager
def _answering(backbone: nn.Module, answer: Any) -> Iterator[None]:
    """Fixes the output of a backbone for a while, so that its model computes the output layer alone."""
    backbone.forward = lambda *_args, **_kwargs: answer
    try:
        yield
    finally:
        del backbone.forward
