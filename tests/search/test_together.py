"""Queries that are searched together: as one by one in results, order, memory and faults; beside the loop."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent_r1.params.search import SearchKind, SearchParams
from agent_r1.records import Passage
from agent_r1.search.base import Search
from agent_r1.search.index import Cached, build, open_local
from agent_r1.search.together import REQUEST, SIZE, THREADS, Together


class Gated(Search):
    waits = False

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []
        self.began = threading.Event()
        self.gate = threading.Event()

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.asked.append((list(queries), k))
        self.began.set()
        assert self.gate.wait(60)
        if "bug" in queries:
            raise RuntimeError("a bug of the index")
        return [[Passage(passage_id=str(i), title=query, text="") for i in range(k)] for query in queries]


async def behind_first(index: Gated, *searches: tuple[str, int]) -> tuple[Together, list[asyncio.Task[list[Passage]]]]:
    """The tasks of a search that is under way, and of others that came meanwhile."""
    together = Together(index)
    first = asyncio.create_task(together.search("first", 1))
    while not index.began.is_set():
        await asyncio.sleep(0.001)
    tasks = [first, *(asyncio.create_task(together.search(*search)) for search in searches)]
    await asyncio.sleep(0)
    return together, tasks


def test_queries_that_come_during_a_search_are_one_batch_by_k_and_size() -> None:
    index = Gated()
    searches = [(f"q{i}", 2) for i in range(SIZE + 1)] + [("other", 3)]

    async def play() -> list[list[Passage]]:
        _, tasks = await behind_first(index, *searches)
        index.gate.set()
        return list(await asyncio.gather(*tasks))

    _, *results = asyncio.run(play())
    assert [[passage.title for passage in passages] for passages in results] == [[query] * k for query, k in searches]
    full = [query for query, _ in searches[:SIZE]]
    assert index.asked == [(["first"], 1), (full, 2), ([f"q{SIZE}"], 2), (["other"], 3)]


def test_queries_that_come_while_all_requests_wait_for_a_server_go_together() -> None:
    class Remote(Gated):
        waits = True

    index = Remote()

    async def play() -> list[list[Passage]]:
        together = Together(index)
        tasks = []
        for number in range(THREADS):
            tasks.append(asyncio.create_task(together.search(f"q{number}", 1)))
            while len(index.asked) == number:
                await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(together.search(f"later {number}", 1)) for number in range(2 * REQUEST + 1)]
        await asyncio.sleep(0)
        index.gate.set()
        return list(await asyncio.gather(*tasks))

    results = asyncio.run(play())
    later = [f"later {number}" for number in range(2 * REQUEST + 1)]
    assert [passage.title for [passage] in results] == [*(f"q{number}" for number in range(THREADS)), *later]
    requests = sorted(len(queries) for queries, _ in index.asked)
    assert requests == [1] * (THREADS + 1) + [REQUEST] * 2


def test_a_search_that_is_cancelled_ends_no_other_and_a_fault_reaches_all_of_its_batch() -> None:
    index = Gated()

    async def play() -> list[list[Passage] | BaseException]:
        together, tasks = await behind_first(index, ("gone", 1), ("stays", 1), ("bug", 2), ("beside", 2))
        tasks[1].cancel()
        index.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [*results, await together.search("after", 1)]

    first, gone, stays, bug, beside, after = asyncio.run(play())
    assert isinstance(gone, asyncio.CancelledError)
    assert str(bug) == str(beside) == "a bug of the index"
    titles = [passages[0].title for passages in (first, stays, after) if isinstance(passages, list)]
    assert titles == ["first", "stays", "after"]


@pytest.mark.parametrize("kind", ["bm25", "dense", "hybrid"])
@pytest.mark.parametrize("entries", [0, 2, 100])
def test_together_is_as_one_by_one(
    kind: SearchKind, entries: int, stored: Path, tmp_path: Path, search_params: SearchParams
) -> None:
    """Results, what is remembered in which order, and the share of hits; with repeated queries and a full memory."""
    build(search_params.model_copy(update={"kind": kind}), stored, tmp_path / "index")
    queries = ["Tesk", "country", "norn twin", "Tesk", "unheard", "mara quill", "norn twin", "Tesk", "city"] * 5
    alone = Cached(open_local(tmp_path / "index"), "hash", entries)
    expected = [alone.search([query], 2)[0] for query in queries]
    index = Cached(open_local(tmp_path / "index"), "hash", entries)
    together = Together(index)

    async def play() -> list[list[Passage]]:
        return list(await asyncio.gather(*(together.search(query, 2) for query in queries)))

    assert asyncio.run(play()) == expected
    assert list(index._results.items()) == list(alone._results.items())
    assert index.take_hit_share() == alone.take_hit_share()
