"""Which trajectories go through a model together. Everything here is deterministic.

Legend for shapes: B = rows of a micro-batch, T = its longest row, N = selected tokens of all its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_r1.seeds import derive


def minibatches(count: int, parts: int, *, seed: int, iteration: int, epoch: int) -> list[NDArray[np.int64]]:
    """Splits `range(count)` into `parts` random sets of nearly equal size: one optimiser step each.

    Raises:
        ValueError: there are fewer rows than parts.
    """
    if count < parts:
        raise ValueError(
            f"update.minibatches {parts} splits {count} trajectories into empty parts; "
            "lower it or raise rollout.questions"
        )
    order = np.random.default_rng(derive(seed, iteration, epoch)).permutation(count)
    return np.array_split(order, parts)


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups rows of similar length so that each group, padded to its longest row, holds at most `max_tokens` tokens.

    Args:
        lengths: tokens of each row.
        max_tokens: the budget of a padded group; a longer row gets a group of its own.

    Returns:
        Indices into `lengths`, the longest rows first, so that too large a budget fails at once.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def pad(rows: Sequence[NDArray[Any]], dtype: torch.dtype) -> Tensor:
    """Rows of different lengths as one tensor [B, T], zeros on the right.

    With causal attention no real token sees the padding, so a model needs no attention mask for the result; leaving
    the mask out keeps the fast attention kernel.
    """
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = torch.tensor(row, dtype=dtype)  # a copy: rows read from Parquet are read-only
    return padded


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Rows that go through a model together, and which of their tokens are asked for."""

    rows: list[int]  # [B] indices into the sequences that were batched
    masks: list[NDArray[np.bool_]]  # [B] of [L]
    ids: Tensor  # [B, T] int64, right-padded
    mask: Tensor  # [B, T] bool, false on padding

    def take(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """The entries of these rows at the selected tokens: [N], in the order of `ids[mask]`.

        Args:
            arrays: one [L] for each of the sequences that were batched.
        """
        chosen = [arrays[row][mask] for row, mask in zip(self.rows, self.masks, strict=True)]
        return torch.from_numpy(np.concatenate(chosen)).to(self.ids.device)

    def split(self, entries: Tensor) -> list[Tensor]:
        """Takes entries [N] apart again: [B], one piece per row."""
        return list(torch.split(entries, [int(mask.sum()) for mask in self.masks]))


def batches(
    sequences: Sequence[NDArray[np.int32]], masks: Sequence[NDArray[np.bool_]], *, max_tokens: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Micro-batches of at most `max_tokens` padded tokens; a sequence without a selected token is in none.

    Args:
        sequences: token ids, each [L].
        masks: the tokens that are asked for, each [L].
    """
    asked = [index for index, mask in enumerate(masks) if mask.any()]
    for group in micro_batches([len(sequences[index]) for index in asked], max_tokens):
        rows = [asked[position] for position in group]
        chosen = [masks[row] for row in rows]
        yield MicroBatch(
            rows=rows,
            masks=chosen,
            ids=pad([sequences[row] for row in rows], torch.long).to(device),
            mask=pad(chosen, torch.bool).to(device),
        )
