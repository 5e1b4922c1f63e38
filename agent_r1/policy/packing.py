"""Contexts that a model sees one after the other in a single row, so that it computes no padding.

All that a layer does but attend, it does token by token. Attention keeps to each context: in bfloat16 on CUDA by one
kernel for all of them (PyTorch's `varlen_attn`, which is FlashAttention), elsewhere by one call for each.

Legend for shapes: B = contexts, T = the longest of them, t = what is computed of all of them, H = heads, D = the size
of one.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED = "agent_r1_packed"  # the name under which transformers knows the attention
KEEP_TO_CONTEXTS = {"full_attention", "sliding_attention"}  # the layers whose attention can be told where one begins
HALVED = (torch.bfloat16, torch.float16)  # what the kernel computes in


def pack(model: PreTrainedModel) -> None:
    """Has a model see contexts packed from now on.

    Two short contexts show that it then says of each what it says of them apart. A ValueError refuses a model that does
    not, because its layers mix tokens by something else than attention, or do not hand on where a context begins.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    ids = torch.arange(24, device=model.device).reshape(2, 12) % model.config.get_text_config().vocab_size
    mask = torch.arange(12, device=model.device) < torch.tensor([[7], [12]], device=model.device)
    with torch.no_grad():
        apart = see(model.base_model, ids, mask).last_hidden_state[:, :-1][mask[:, 1:]].float()
        model.set_attn_implementation(PACKED)
        together = see(model.base_model, ids, mask).last_hidden_state[:, :-1][mask[:, 1:]].float()
    tolerance = 1e-3 if model.dtype is torch.float32 else 0.05
    if kinds - KEEP_TO_CONTEXTS or (together - apart).norm() > tolerance * apart.norm():
        raise ValueError(
            f"{type(model).__name__} does not keep contexts apart that are packed into one row; set model.packing: "
            "false"
        )


def is_packed(config: Any) -> bool:
    """Whether the model of a configuration sees contexts packed."""
    return bool(config._attn_implementation == PACKED)


def see(backbone: nn.Module, ids: Tensor, mask: Tensor, config: Any = None) -> Any:
    """What a backbone answers to right-padded ids [B, T], of whose tokens the mask [B, T] selects some.

    Its hidden states [B, T, hidden size] are right before every token that is selected. Of packed contexts what comes
    after the last of these is not computed, and 0. The `config` is the model's, where the backbone has none.
    """
    if not is_packed(config or backbone.config):
        return backbone(input_ids=ids, use_cache=False)
    asked = F.pad(mask[:, 1:], (0, 1))
    needed = asked.flip(1).cumsum(1).flip(1) > 0
    lengths = needed.sum(1)
    longest, starts = int(lengths.max()), F.pad(lengths.cumsum(0), (1, 0)).int()
    seen = backbone(
        input_ids=ids[needed].unsqueeze(0),
        position_ids=(needed.cumsum(1) - 1)[needed].unsqueeze(0),
        use_cache=False,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=longest,
        max_length_k=longest,
    )
    packed = seen.last_hidden_state.squeeze(0)
    hidden = packed.new_zeros(*ids.shape, packed.shape[-1])
    hidden[needed] = packed
    return replace(seen, last_hidden_state=hidden)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within contexts of which [B + 1] tells the starts, and the end: [1, H, t, D] -> [1, t, H, D].

    Keys and values may have fewer heads. Without starts every row is a context, right-padded.
    """
    if cu_seq_lens_q is None:
        attention_mask = _window(query.shape[2], sliding_window, query.device)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    if query.is_cuda and value.dtype in HALVED:
        from torch.nn.attention.varlen import varlen_attn  # registers operators, which costs time

        # Rotary positions make float32 of queries and keys where the weights are; no product ever made values that.
        rows = [each.squeeze(0).transpose(0, 1).to(value.dtype) for each in (query, key, value)]
        attended = varlen_attn(
            rows[0],
            rows[1],
            rows[2],
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(sliding_window - 1 if sliding_window else -1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return cast(Tensor, attended).unsqueeze(0), None

    def alone(span: slice) -> Tensor:
        window = _window(span.stop - span.start, sliding_window, query.device)
        rows = query[:, :, span], key[:, :, span], value[:, :, span]
        return sdpa_attention_forward(module, *rows, window, scaling=scaling, **others)[0]

    spans = itertools.starmap(slice, itertools.pairwise(cu_seq_lens_q.tolist()))
    return torch.cat([alone(span) for span in spans if span.start < span.stop], 1), None


def _window(length: int, size: int | None, device: torch.device) -> Tensor | None:
    """Which keys each query sees where it does not see all that came before."""
    if not size or length <= size:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return ((distance >= 0) & (distance < size))[None, None]


AttentionInterface.register(PACKED, attend)
