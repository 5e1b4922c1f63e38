"""Several rankings made one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from agent_r1.search.base import Positions, Ranker


class Hybrid(Ranker):
    """Reciprocal rank fusion of several rankers."""

    def __init__(self, rankers: Sequence[Ranker], *, constant: int, candidates: int) -> None:
        """Fuses the best `candidates` of each ranker, or `k` of them where more are asked for."""
        self._rankers = rankers
        self._constant = constant
        self._candidates = candidates

    def rank(self, query: str, k: int) -> Positions:
        depth = max(k, self._candidates)
        return fuse([ranker.rank(query, depth) for ranker in self._rankers], self._constant)[:k]


def fuse(rankings: Sequence[Positions], constant: int) -> Positions:
    """Everything that is ranked anywhere, by the sum of `1 / (constant + rank)`, ranks from 1; best first.

    Reciprocal rank fusion: Cormack, Clarke and Büttcher, SIGIR 2009, with 60 for the constant. Equal sums rank by
    position.
    """
    sums: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, position in enumerate(ranking.tolist(), start=1):
            sums[position] += 1 / (constant + rank)
    return np.array(sorted(sums, key=lambda position: (-sums[position], position)), np.int64)
