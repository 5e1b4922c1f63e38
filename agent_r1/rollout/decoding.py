"""Decoding a batch with transformers: left padding, a key-value cache, and rows that leave when they end.

Legend for shapes: B = rows that still run, T = tokens so far with padding, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


def draws(seed: int, count: int) -> NDArray[np.float64]:
    """[count] uniform in [0, 1): all the randomness of one action, a number per token."""
    return np.random.default_rng(seed).random(count)


def choose(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A token per row, and what the model itself thinks of it.

    The token is where the cumulated probabilities pass the row's uniform number, so that a logit which is off by a
    rounding error changes it once in many thousand draws. Nothing depends on the other rows.

    Args:
        logits: [B, V]
        uniforms: [B] float64 in [0, 1)
        temperature: 0 takes the likeliest token.

    Returns:
        Tokens [B], and their logprobs [B] float32 in nats at temperature 1, whatever the temperature.
    """
    logprobs = logits.float().log_softmax(-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cumulated = (logprobs.double() / temperature).softmax(-1).cumsum(-1)
        target = uniforms[:, None] * cumulated[:, -1:]
        tokens = torch.searchsorted(cumulated, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def left_padded(contexts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids [B, T] with 0 before the shorter contexts, and the mask [B, T] that is 1 where there is a token."""
    width = max(map(len, contexts))
    ids = torch.tensor([[0] * (width - len(context)) + list(context) for context in contexts])
    mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
    return ids, mask


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    contexts: Sequence[Sequence[int]],
    uniforms: Sequence[NDArray[np.float64]],
    *,
    end_id: int,
    temperature: float,
) -> list[tuple[list[int], list[float]]]:
    """Ids and logprobs of one action per context; it ends with `end_id`, or where its uniform numbers do."""
    actions: list[tuple[list[int], list[float]]] = [([], []) for _ in contexts]
    running = list(range(len(contexts)))  # [B] indexes into the contexts
    cache = DynamicCache(config=model.config)
    unread, mask = (tensor.to(model.device) for tensor in left_padded(contexts))
    while running:
        logits = _next_logits(model, unread, mask, cache)
        now = torch.tensor([uniforms[index][len(actions[index][0])] for index in running], device=model.device)
        tokens, logprobs = choose(logits, now, temperature)
        for index, token, logprob in zip(running, tokens.tolist(), logprobs.tolist(), strict=True):
            actions[index][0].append(token)
            actions[index][1].append(logprob)
        going = [row for row, index in enumerate(running) if _goes_on(actions[index][0], uniforms[index], end_id)]
        if len(going) < len(running):
            rows = torch.tensor(going, dtype=torch.long, device=model.device)
            cache.batch_select_indices(rows)
            tokens, mask, running = tokens[rows], mask[rows], [running[row] for row in going]
        unread = tokens[:, None]
        mask = torch.cat([mask, torch.ones_like(unread)], dim=1)
    return actions


def _next_logits(model: PreTrainedModel, unread: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """[B, V] of the token after the unread ones, which the cache has then read."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -unread.shape[1] :]
    out = model(
        input_ids=unread,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = out.logits[:, -1]
    return logits


def _goes_on(ids: Sequence[int], uniforms: NDArray[np.float64], end_id: int) -> bool:
    return ids[-1] != end_id and len(ids) < len(uniforms)
