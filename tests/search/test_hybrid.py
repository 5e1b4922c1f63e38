from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.search.base import Positions
from agent_r1.search.index import Hybrid, fuse


class Fixed:
    """Ranks as it was told, and remembers how many were asked for."""

    def __init__(self, *positions: int) -> None:
        self._positions = np.array(positions, np.int64)
        self.asked: list[int] = []

    def rank(self, query: str, k: int) -> Positions:
        self.asked.append(k)
        return self._positions[:k]


def test_ranks_are_fused_by_hand() -> None:
    """Constant 1: 7 gets 1/2 + 1/4 = .75, 5 gets 1/3 + 1/2 = .83, 9 gets 1/4, 2 gets 1/3."""
    rankings = [np.array([7, 5, 9]), np.array([5, 2, 7])]
    assert fuse(rankings, 1).tolist() == [5, 7, 2, 9]


def test_equal_sums_rank_by_position() -> None:
    assert fuse([np.array([4, 1]), np.array([1, 4])], 60).tolist() == [1, 4]
    assert fuse([np.array([8]), np.array([3])], 60).tolist() == [3, 8]
    assert fuse([np.array([], np.int64), np.array([], np.int64)], 60).tolist() == []


@pytest.mark.parametrize(("k", "depth"), [(2, 3), (3, 3), (4, 4)])
def test_candidates_or_k_of_each_are_fused(k: int, depth: int) -> None:
    first, second = Fixed(1, 2, 3, 4, 5), Fixed(5, 4, 3, 2, 1)
    found = Hybrid([first, second], constant=60, candidates=3).rank("q", k)
    assert first.asked == second.asked == [depth]
    assert len(found) == k
    assert found[0] == (3 if depth == 3 else 2)  # the only one in both, or the first of 2, 3, 4


@given(st.lists(st.permutations(list(range(6))), min_size=1, max_size=3), st.integers(0, 100))
def test_a_ranking_fused_with_itself_stays_and_order_of_rankers_is_nothing(
    rankings: list[list[int]], constant: int
) -> None:
    arrays = [np.array(ranking) for ranking in rankings]
    assert fuse([arrays[0], arrays[0]], constant).tolist() == rankings[0]
    if len(arrays) == 2:
        assert fuse(arrays, constant).tolist() == fuse(arrays[::-1], constant).tolist()
