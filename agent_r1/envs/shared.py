"""What all episodes of a stage use: the limits, the index, the tools, and the loop in which environments wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from agent_r1.params.stages import EnvParams
from agent_r1.search.index import Cached
from agent_r1.tools.base import Tool
from agent_r1.tools.journal import Journal
from agent_r1.tools.search import search_tool

T = TypeVar("T")


class Shared:
    """Opened once by a stage and closed at its end; a connection that a tool opens lives as long.

    Without an index there is nothing to search: episodes may have no tools then.
    """

    def __init__(self, limits: EnvParams, index: Cached | None = None) -> None:
        self.limits, self._index = limits, index
        self.journal: Journal | None = None
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._runner.close()

    @property
    def index(self) -> Cached:
        """Raises ValueError without one."""
        if self._index is None:
            raise ValueError("there is no index to search; open one")
        return self._index

    def tools(self) -> list[Tool]:
        """The tools of one episode."""
        return [search_tool(self.index, top_k=self.limits.top_k)]

    @contextmanager
    def journaled(self, path: Path) -> Iterator[None]:
        """Episodes that are played within ask the world only for what the journal does not hold, and add to it."""
        self.journal = Journal(path)
        try:
            yield
        finally:
            self.journal = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises; whatever it waits for is served meanwhile."""
        return self._runner.run(coroutine)
