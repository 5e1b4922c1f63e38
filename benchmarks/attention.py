"""Attention over packed contexts against float64, for the kit and for the comparison with a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from agent_r1.learn.model import SPANS, attend
from agent_r1.learn.prefixes import Segment, Tree
from agent_r1.pretrained import default_device
from benchmarks.kit import Row, counted_kernel

CPU = torch.device("cpu")
Floats = NDArray[Any]


def far(found: Floats, expected: Floats) -> float:
    """The norm of the difference by that of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def spans(segments: list[Segment], device: torch.device) -> dict[str, Any]:
    """Where the queries of segments begin, and the keys that each one sees."""
    lengths = ([segment.length for segment in segments], [sum(segments[at].length for at in s.path) for s in segments])
    starts = [torch.tensor(np.cumsum([0, *each]), dtype=torch.int32, device=device) for each in lengths]
    return dict(zip(SPANS, (*starts, *map(max, lengths)), strict=True))


def compare_attention(window: int | None, size: int, dtype: torch.dtype = torch.bfloat16) -> Row:
    """Packed contexts, some of which share a segment, against float64 on the CPU, and calls of the kernel."""
    lengths, heads, key_heads = [33, 1, 257, 128], 8, 2
    draws = torch.Generator().manual_seed(size)
    whole = [torch.randn(1, count, sum(lengths), size, generator=draws) for count in (heads, key_heads, key_heads)]
    seed = torch.randn(1, sum(lengths), heads, size, generator=draws)
    # The last two are contexts of their own, and begin with the first.
    paths = [(0,), (1,), (0, 2), (0, 3)]
    segments = [Segment(at, 0, length, path) for at, (length, path) in enumerate(zip(lengths, paths, strict=True))]
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
                tree=Tree(segments, *[torch.empty(0)] * 3),
                **spans(segments, device),
            )
            attended.backward(seed.to(device, attended.dtype))
            results.append([attended.detach(), *(each.grad for each in parts)])
    found = [far(ours.double().cpu().numpy(), theirs.numpy()) for theirs, ours in zip(*results, strict=True)]
    return dict(zip(("attended", "of queries", "of keys", "of values"), found, strict=True)) | {"calls": len(calls)}
