from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.records import Passage
from agent_r1.search.base import SearchUnavailable
from agent_r1.search.index import Cached


class Recorded:
    """Finds the query itself, k times, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []
        self.down = False

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        if self.down:
            raise SearchUnavailable("down")
        self.asked.append((list(queries), k))
        return [[Passage(passage_id=str(i), title=query, text="") for i in range(k)] for query in queries]


def test_only_new_searches_reach_the_index() -> None:
    index = Recorded()
    cached = Cached(index, "hash", 10)
    first = cached.search(["a", "b", "a"], 1)
    assert [[passage.title for passage in result] for result in first] == [["a"], ["b"], ["a"]]
    assert cached.search(["b", "c"], 1)[0] == first[1]
    assert len(cached.search(["b"], 2)[0]) == 2
    cached.search(["b"], 2)
    assert index.asked == [(["a", "b"], 1), (["c"], 1), (["b"], 2)]


def test_the_hit_share_is_that_of_the_searches_since_it_was_asked() -> None:
    cached = Cached(Recorded(), "hash", 10)
    assert cached.take_hit_share() == 0
    cached.search(["a"], 1)
    cached.search(["a", "b", "a"], 1)
    assert cached.take_hit_share() == 2 / 4
    assert cached.take_hit_share() == 0


def test_the_least_recently_used_is_forgotten() -> None:
    index = Recorded()
    cached = Cached(index, "hash", 2)
    for query in ("a", "b", "a", "c", "a", "b"):
        cached.search([query], 1)
    assert [queries for queries, _ in index.asked] == [["a"], ["b"], ["c"], ["b"]]


def test_without_entries_every_search_reaches_the_index() -> None:
    index = Recorded()
    cached = Cached(index, "hash", 0)
    for _ in range(2):
        cached.search(["a"], 1)
    assert len(index.asked) == 2
    assert cached.take_hit_share() == 0


def test_a_search_that_fails_is_made_again() -> None:
    index = Recorded()
    cached = Cached(index, "hash", 10)
    index.down = True
    with pytest.raises(SearchUnavailable):
        cached.search(["a"], 1)
    index.down = False
    assert cached.search(["a"], 1)[0][0].title == "a"


def test_what_is_done_to_a_result_is_not_remembered() -> None:
    cached = Cached(Recorded(), "hash", 10)
    cached.search(["a"], 1)[0].clear()
    assert len(cached.search(["a"], 1)[0]) == 1


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4), max_size=8), st.integers(0, 4))
def test_it_changes_no_result(calls: list[list[str]], entries: int) -> None:
    cached = Cached(Recorded(), "hash", entries)
    for queries in calls:
        assert cached.search(queries, 2) == Recorded().search(queries, 2)
