"""Attention over packed contexts against float64, for the kit and for the comparison with a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from agent_r1.learn.model import attend
from agent_r1.pretrained import default_device
from benchmarks.kit import Row, counted_kernel

CPU = torch.device("cpu")
Floats = NDArray[Any]


def far(found: Floats, expected: Floats) -> float:
    """The norm of the difference by that of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def compare_attention(window: int | None, size: int, dtype: torch.dtype = torch.bfloat16) -> Row:
    """Packed contexts against float64 on the CPU, with gradients; and how often the kernel was called."""
    lengths, heads, key_heads = [33, 1, 257, 128], 8, 2
    draws = torch.Generator().manual_seed(size)
    whole = [torch.randn(1, count, sum(lengths), size, generator=draws) for count in (heads, key_heads, key_heads)]
    seed, starts = torch.randn(1, sum(lengths), heads, size, generator=draws), [0, *np.cumsum(lengths).tolist()]
    layer, results = nn.Module(), []
    layer.num_key_value_groups, layer.is_causal = heads // key_heads, True
    with counted_kernel() as calls:
        for device, kind in ((CPU, torch.float64), (default_device(), dtype)):
            parts = [each.to(device, kind).requires_grad_() for each in whole]
            attended, _ = attend(
                layer,
                *parts,
                None,
                scaling=size**-0.5,
                sliding_window=window,
                cu_seq_lens_q=torch.tensor(starts, dtype=torch.int32, device=device),
                max_length_q=max(lengths),
            )
            attended.backward(seed.to(device, attended.dtype))
            results.append([attended.detach(), *(each.grad for each in parts)])
    found = [far(ours.double().cpu().numpy(), theirs.numpy()) for theirs, ours in zip(*results, strict=True)]
    return dict(zip(("attended", "of queries", "of keys", "of values"), found, strict=True)) | {"calls": len(calls)}
