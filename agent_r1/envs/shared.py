"""The parts that all episodes of a stage share: limits, index, tools, journal, and the loop in which they wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from agent_r1.envs.base import Conversation
from agent_r1.envs.conversations import read_examples
from agent_r1.params.env import EnvParams
from agent_r1.records import Metrics, Trajectory
from agent_r1.search.index import Cached
from agent_r1.tools.base import Tool
from agent_r1.tools.journal import Journal
from agent_r1.tools.toolbox import Toolbox, latencies, own_sources, use_of_tools

T = TypeVar("T")
Resource = TypeVar("Resource")


class Shared:
    """Opened once by a stage and closed at its end, with all that its tools have opened."""

    def __init__(self, limits: EnvParams, index: Cached | None = None) -> None:
        self.limits = limits
        self._index = index
        self.journal: Journal | None = None
        self.measured = Counter[str]()  # metrics that are counts, since they were taken
        self._runner = asyncio.Runner()
        self._toolbox: Toolbox | None = None
        self._open = AsyncExitStack()
        self._resources = dict[object, Any]()
        self._waits: asyncio.Task[Any] | None = None  # the task that is in `run`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: Any) -> None:
        try:
            if self._toolbox or self._resources:
                self.run(self._open.__aexit__(*fault))
        finally:
            self._runner.close()

    @cached_property
    def examples(self) -> list[Conversation]:
        """The conversations that open every context; raises as `read_examples`."""
        return read_examples(self.limits)

    @property
    def index(self) -> Cached:
        """Raises ValueError without one."""
        if self._index is None:
            raise ValueError("there is no index to search; open one")
        return self._index

    def tools(self, seed: int) -> list[Tool]:
        """One episode's tools by its seed, opened by the first call; ValueError if unfit, WorldFault if one is down."""
        if self._toolbox is None:
            self._toolbox = self.run(self._open.enter_async_context(Toolbox(self.limits, self._index)))
        return self._toolbox.tools(seed)

    def once(self, kind: Callable[[EnvParams], AbstractAsyncContextManager[Resource]]) -> Resource:
        """Something that all episodes share, made and opened by the first call, and closed with the stage."""
        if kind not in self._resources:
            self._resources[kind] = self.run(self._open.enter_async_context(kind(self.limits)))
        resource: Resource = self._resources[kind]
        return resource

    def take_measures(self) -> Metrics:
        """The metrics of agents outside, and those that were counted, since the last call."""
        measured: Metrics = dict(self.measured)
        self.measured.clear()
        for resource in self._resources.values():
            measured |= resource.take_measures()
        return measured

    @property
    def waited_s(self) -> float:
        """The seconds so far in which a call of a tool was under way."""
        return self._toolbox.under_way.seconds if self._toolbox else 0.0

    def use_of_tools(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """How often the policy called each tool, and with what success; empty if no episode asked for tools."""
        return use_of_tools(trajectories, self._toolbox.names) if self._toolbox else {}

    def latencies(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """How long the calls of each tool took; empty if no episode asked for tools."""
        return latencies(trajectories, self._toolbox.names) if self._toolbox else {}

    def sources(self) -> dict[str, str]:
        """The sha256 of each tool and class of the user's own, by name."""
        return own_sources(self.limits)

    def verify(self) -> None:
        """Raises ValueError if a server offers other tools than at first, and WorldFault if one is silent."""
        if self._toolbox:
            self.run(self._toolbox.verify())

    @contextmanager
    def journaled(self, path: Path) -> Iterator[None]:
        """Within, episodes ask the world only for answers that the journal does not hold, and add them to it."""
        self.journal = Journal(path)
        try:
            yield
        finally:
            self.journal = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine on the loop of the stage and returns its result."""

        async def task() -> T:
            self._waits = asyncio.current_task()
            try:
                return await coroutine
            finally:
                self._waits = None

        return self._runner.run(task())

    def interrupt(self) -> None:
        """Raises CancelledError in `run` in another thread, if it is waiting there."""

        def cancel() -> None:
            if self._waits:
                self._waits.cancel()

        self._runner.get_loop().call_soon_threadsafe(cancel)
