"""Queries that are under way together, searched together in a thread: the loop that asks goes on meanwhile."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from agent_r1.records import Passage
from agent_r1.search.base import Search

SIZE = 32  # queries of a batch: the first has its passages before the last of many is searched
REQUEST = 8  # queries of a request to a server, which has those of other clients too
THREADS = 16  # requests that wait for a server at once


@dataclass(frozen=True, slots=True)
class _Batch:
    """Queries for as many passages each."""

    queries: list[str]
    results: Future[list[list[Passage]]]


def search_threads(index: Search | None) -> ThreadPoolExecutor:
    """One thread for an index, since tokenizers are not made for several, or many that wait for its server."""
    return ThreadPoolExecutor(THREADS if index and index.waits else 1, "search")


class Together:
    """An index for the tasks of a loop. Results, their order and what is remembered are those of one by one."""

    def __init__(self, index: Search, threads: Executor | None = None, size: int | None = None) -> None:
        """Asks the index in `threads`, by default `search_threads` of its own, for up to `size` queries at a time."""
        self._index = index
        self._threads = threads or search_threads(index)
        self._size = size or (REQUEST if index.waits else SIZE)
        self._open = dict[int, _Batch]()  # by k: until their search begins, others join
        self._lock = Lock()

    async def search(self, query: str, k: int) -> list[Passage]:
        """The `k` best passages of a query; raises as `Search.search`."""
        with self._lock:
            batch = self._open.get(k) or self._begin(k)
            place = len(batch.queries)
            batch.queries.append(query)
            if len(batch.queries) == self._size:
                del self._open[k]
        # The others go on waiting for the batch if this one is cancelled.
        results = await asyncio.shield(asyncio.wrap_future(batch.results))
        return results[place]

    async def read(self, title: str) -> list[Passage]:
        """The passages of a title; raises as `Search.read`."""
        return await asyncio.wrap_future(self._threads.submit(self._index.read, title))

    def _begin(self, k: int) -> _Batch:
        queries = list[str]()
        self._open[k] = _Batch(queries, self._threads.submit(self._search, queries, k))
        return self._open[k]

    def _search(self, queries: list[str], k: int) -> list[list[Passage]]:
        with self._lock:
            if k in self._open and self._open[k].queries is queries:
                del self._open[k]
        return self._index.search(queries, k)
