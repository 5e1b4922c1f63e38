"""Sums of weights: equal for equal tensors, however a sampler has cut and joined them, and cheap on every device.

A tensor's sum adds up the bits of its elements, each times an odd number that its row and column give, modulo 2**64.
So another element at one place always changes it, and other differences do but for a chance of about 2**-60. The sum
of a whole is that of its slices, each taken at its place: ranks of a sampler sum what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Slice = tuple[str, int, int, int]  # a whole tensor's name, the first row and column of a part of it, the part's sum

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_AT_ONCE = {"cpu": 1 << 16}  # elements that are widened to 8 bytes, which a core's cache holds; elsewhere more


def tensor_sum(tensor: Tensor, row: int = 0, column: int = 0) -> int:
    """The sum of a tensor in a type of `_BITS` that begins at a row and column of a larger one.

    A vector is one column of rows; the leading dimensions of more than two are rows too. Both zeros count as one.
    """
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    height, width = matrix.shape
    rows = _odd(row, height, 1, tensor.device)
    columns = _odd(column, width, 2, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = max(1, _AT_ONCE.get(tensor.device.type, 1 << 24) // max(1, width))
    for start in range(0, height, step):
        bits = (matrix[start : start + step] + 0.0).view(_BITS[tensor.dtype])  # a negative zero plus 0 is positive
        total += ((bits.long() * columns).sum(1) * rows[start : start + step]).sum()
    return int(total)


def sums_of(state: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, int]:
    """The sums of a model's tensors by name, each rounded to a sampler's `dtype`; whole numbers have none."""
    return {name: tensor_sum(tensor.to(dtype)) for name, tensor in state if tensor.is_floating_point()}


def adapter_sums(model: nn.Module, state: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, int]:
    """The sums of the adapters of peft among a model's weights, by the names in peft's files.

    The second matrix is scaled, as vLLM keeps it.
    """
    sums = dict[str, int]()
    for name, weight in state:
        layer, adapted, rest = name.partition(".lora_")
        if adapted:
            matrix, adapters, leaf = rest.split(".")
            scale: Any = model.get_submodule(layer).scaling
            rounded = weight.to(dtype) * (scale[adapters] if matrix == "B" else 1)
            sums[f"base_model.model.{layer}.lora_{matrix}.{leaf}"] = tensor_sum(rounded)
    return sums


def joined(ranks: Iterable[Iterable[Slice]]) -> dict[str, int]:
    """The sums of whole tensors by name, from the slices that each rank holds.

    A slice that several ranks hold counts once; where they differ, each counts, and the sum is wrong.
    """
    totals = dict[str, int]()
    for name, _, _, part in {entry for rank in ranks for entry in rank}:
        totals[name] = wrapped(totals.get(name, 0) + part)
    return totals


def wrapped(total: int) -> int:
    """A number modulo 2**64, as a signed one of 64 bits."""
    return (total + 2**63) % 2**64 - 2**63


def differing(sums: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    """The names of tensors whose sums differ, of those that both sides know."""
    return sorted(name for name in sums.keys() & expected.keys() if sums[name] != expected[name])


def _odd(first: int, count: int, stream: int, device: torch.device) -> Tensor:
    """[count] odd numbers of 64 bits that look random, one for each place from the `first`."""
    mixed = torch.arange(first, first + count, device=device) * 2 + stream
    for factor in (-7046029254386353131, -4658895280553007687, -7723592293110705685):  # of SplitMix64
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> 31)
    return mixed | 1
