"""Contexts that begin alike, as a tree of segments: what several of them share is computed once.

The samples of a question share its prompt, and often a call with its passages; all contexts of an iteration share the
instructions. Source: Tree Training (arXiv 2511.00413).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_r1.records import Int64s

LEAST = 32  # shared tokens that are worth a segment: each one costs every layer a call of its own
COPIES = 8  # the keys and values of a shared token, which each context holds, are an eighth of a token's memory


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Contexts in an order in which those that begin alike stand together."""

    order: list[int]  # indices of the contexts
    shared: list[int]  # tokens that each one in this order shares with the one before it; 0 below LEAST

    @classmethod
    def of(cls, contexts: Sequence[NDArray[np.integer]]) -> Neighbours:
        """Sorts contexts of token ids [t]."""
        order = sorted(range(len(contexts)), key=lambda index: (contexts[index].tobytes(), index))
        pairs = itertools.pairwise(order)
        shared = [common(contexts[before], contexts[after]) for before, after in pairs]
        return cls(order, [0, *(tokens if tokens >= LEAST else 0 for tokens in shared)][: len(order)])

    def packs(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Packs neighbours together, up to a budget of tokens; shared ones count once, and an eighth each further time.

        `lengths` are all tokens of each trajectory, whose first contexts these are. One beyond the budget gets a pack
        of its own.
        """
        packs = list[list[int]]()
        size = 0
        for index, shared in zip(self.order, self.shared, strict=True):
            added = lengths[index] - shared + -(-shared // COPIES)
            if packs and size + added <= max_tokens:
                packs[-1].append(index)
                size += added
            else:
                packs.append([index])
                size = lengths[index]
        return packs


def common(first: NDArray[np.integer], second: NDArray[np.integer]) -> int:
    """The tokens with which both contexts begin."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that follow each other in one or several contexts."""

    context: int  # one of them
    start: int  # in the context, as is `stop`
    stop: int
    path: tuple[int, ...]  # numbers of the segments of the context up to here, this one last

    @property
    def length(self) -> int:
        """Its tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Tree:
    """The segments of B contexts, which lie one after the other in a row of t tokens."""

    segments: list[Segment]
    source: Tensor  # [t] where each token of the row stands in the flattened contexts [B * T]
    positions: Tensor  # [t] its position in its context
    place: Tensor  # [B, T] where each token of the contexts stands in the row; 0 behind their ends

    @classmethod
    def of(cls, ids: Tensor, lengths: Tensor, *, shared: bool) -> Tree:
        """The tree of right-padded ids [B, T], of which `lengths` [B] count; each context a segment unless `shared`."""
        contexts = [row[:length] for row, length in zip(ids.cpu().numpy(), lengths.tolist(), strict=True)]
        place = np.zeros(ids.shape, np.int64)
        segments = list[Segment]()
        size = 0
        for segment, among in _grown(contexts, shared=shared):
            place[among, segment.start : segment.stop] = np.arange(size, size + segment.length)
            segments.append(segment)
            size += segment.length
        positions = np.concatenate([np.arange(segment.start, segment.stop) for segment in segments])
        owners = np.repeat([segment.context for segment in segments], [segment.length for segment in segments])
        arrays = owners * ids.shape[1] + positions, positions, place
        return cls(segments, *map(partial(torch.as_tensor, device=ids.device), arrays))


class _Branch(NamedTuple):
    """Neighbours that are alike up to a depth."""

    first: int
    stop: int
    depth: int
    path: tuple[int, ...]  # of the segments up to there

    def cut(self, shared: Sequence[int]) -> list[_Branch]:
        """The branches that go on apart, by what each neighbour but the first shares with the one before it."""
        apart = [self.first + 1 + at for at, tokens in enumerate(shared) if tokens < self.depth + LEAST]
        pairs = itertools.pairwise([self.first, *apart, self.stop])
        return [self._replace(first=first, stop=stop) for first, stop in pairs]


def _grown(contexts: list[Int64s], *, shared: bool) -> Iterator[tuple[Segment, list[int]]]:
    """Yields the segments, each behind those of its path, with the contexts that have it."""
    if not shared:
        for index, context in enumerate(contexts):
            yield Segment(index, 0, len(context), (index,)), [index]
        return
    neighbours = Neighbours.of(contexts)
    count = 0
    branches = [_Branch(0, len(contexts), 0, ())]
    while branches:
        branch = branches.pop()
        among = neighbours.order[branch.first : branch.stop]
        inner = neighbours.shared[branch.first + 1 : branch.stop]
        end = min(inner, default=len(contexts[among[0]]))
        if end - branch.depth >= (LEAST if inner else 1):
            path = (*branch.path, count)
            count += 1
            yield Segment(among[0], branch.depth, end, path), among
            branch = branch._replace(depth=end, path=path)
        if inner:
            branches += branch.cut(inner)[::-1]
