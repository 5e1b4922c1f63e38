"""The tools of a stage, as `env.tools` offers them: opened once, shared by its episodes, and closed with the stage."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Protocol, Self

import numpy as np

from agent_r1 import own_code
from agent_r1.params.env import EnvParams
from agent_r1.params.tools import ToolsParams
from agent_r1.records import Call, CallStatus, Json, Metrics, Trajectory
from agent_r1.search.base import Search
from agent_r1.search.together import search_threads
from agent_r1.tools.base import FunctionTool, Schema, Tool, ToolResult
from agent_r1.tools.calculator import calculator
from agent_r1.tools.search import read_tool, search_tool

_HALF = re.compile("[\ud800-\udfff]")  # of a character


class UnderWay:
    """Measures the time in which at least one call is under way."""

    def __init__(self) -> None:
        self._calls = 0
        self._since = 0.0
        self.seconds = 0.0  # up to the last moment without a call

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call is under way within; others may be at the same time."""
        if not self._calls:
            self._since = time.perf_counter()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self.seconds += time.perf_counter() - self._since


class ToolServer(Protocol):
    """A server whose tools an episode may call; see `agent_r1.outside.mcp`."""

    async def verify(self) -> None:
        """Raises ValueError if it has other tools now than at first, and WorldFault if it is silent."""

    def for_episode(self, is_as_kept: Callable[[ToolResult, ToolResult], bool]) -> Sequence[Tool]:
        """The tools of one episode; `is_as_kept` compares a result with one that a journal kept."""


class Toolbox:
    """Open it in the loop in which its tools are called: it starts the sandbox's workers and the MCP servers."""

    def __init__(self, params: EnvParams, index: Search | None) -> None:
        """Raises ValueError if `search` or `read` is offered without an index."""
        if index is None and (params.tools.search is not None or params.tools.read):
            raise ValueError("env.tools offers search or read, and there is no index; build one, or set both to null")
        self.schemas: list[Schema] = []  # the same for all episodes
        self.under_way = UnderWay()
        self._params = params
        self._index = index
        self._servers: list[ToolServer] = []
        self._makers: list[Callable[[int], Sequence[Tool]]] = []  # tools for the seed of an episode
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Raises ValueError for tools that cannot be offered as configured, and WorldFault if a server is down."""
        async with AsyncExitStack() as opening:
            if self._params.tools.mcp:
                server = import_module("agent_r1.outside.mcp").Server
                servers = [server(name, params) for name, params in self._params.tools.mcp.items()]
                self._servers = [await opening.enter_async_context(server) for server in servers]
            self._makers = list(self._offered(opening))
            self.schemas = [tool.schema for tool in self.tools(0)]
            [(name, times)] = Counter(self.names).most_common(1)
            if times > 1:
                raise ValueError(
                    f"env.tools offers {times} tools of the name {name!r}; leave all but one out, those of an MCP "
                    "server with its key tools"
                )
            self._open = opening.pop_all()
        return self

    async def __aexit__(self, *fault: Any) -> None:
        await self._open.__aexit__(*fault)

    def tools(self, seed: int) -> list[Tool]:
        """The tools of one episode by its seed, in the order of `schemas`, to be closed where they were called."""
        tools = [tool for make in self._makers for tool in make(seed)]
        return [Limited(tool, self._params.max_result_characters, self.under_way) for tool in tools]

    @property
    def names(self) -> list[str]:
        """The names of the tools, in the order of `schemas`."""
        return [schema["function"]["name"] for schema in self.schemas]

    async def verify(self) -> None:
        """Raises ValueError if an MCP server has other tools now than at first, and WorldFault if one is silent."""
        for server in self._servers:
            await server.verify()

    def _offered(self, opening: AsyncExitStack) -> Iterator[Callable[[int], Sequence[Tool]]]:
        """The tools that `env.tools` switches on, in the order in which the policy is told of them."""
        offered = self._params.tools
        threads = search_threads(self._index)
        opening.callback(threads.shutdown, cancel_futures=True)
        if self._index is not None and offered.search is not None:
            yield _shared(search_tool(self._index, top_k=self._params.top_k, threads=threads))
        if offered.calculator is not None:
            yield _shared(FunctionTool(calculator))
        if self._index is not None and offered.read:
            characters = offered.read.part_characters
            threads.submit(self._index.read, "").result()  # an index that finds no titles is refused before episodes
            yield _shared(read_tool(self._index, part_characters=characters, threads=threads))
        if offered.python:
            python = import_module("agent_r1.outside.sandbox")
            sandbox = opening.enter_context(python.Sandbox(offered.python))
            yield lambda seed: [python.PythonTool(sandbox, seed)]
        yield _shared(*own_tools(offered))
        for server in self._servers:
            yield partial(self._of_server, server)

    def _of_server(self, server: ToolServer, _: int) -> Sequence[Tool]:
        return server.for_episode(lambda result, entry: cut(result, self._params.max_result_characters) == entry)


class Limited(Tool):
    """A tool whose calls are timed, and whose results are text that can be stored, and no longer than a limit."""

    def __init__(self, tool: Tool, max_characters: int, under_way: UnderWay) -> None:
        self.name = tool.name
        self.schema = tool.schema
        self.waits = tool.waits
        self._tool = tool
        self._max_characters = max_characters
        self._under_way = under_way

    async def call(self, arguments: Json) -> ToolResult:
        with self._under_way.call():
            return cut(await self._tool.call(arguments), self._max_characters)

    async def recall(self, arguments: Json, result: ToolResult) -> None:
        await self._tool.recall(arguments, result)

    async def close(self) -> None:
        await self._tool.close()


def cut(result: ToolResult, max_characters: int) -> ToolResult:
    """A result cut after so many characters, which it says; titles beyond are dropped, half characters replaced."""
    text = _HALF.sub("\N{REPLACEMENT CHARACTER}", result.text)
    if len(text) <= max_characters:
        return result if text == result.text else replace(result, text=text)
    head = text[:max_characters]
    titles = tuple(title for title in result.titles if " ".join(title.split()) in head)
    return replace(result, text=f"{head} [... {len(text) - max_characters:,} characters left out]", titles=titles)


def _shared(*tools: Tool) -> Callable[[int], Sequence[Tool]]:
    return lambda seed: tools


def own_tools(params: ToolsParams) -> list[FunctionTool]:
    """The user's functions as tools; a ValueError says which module or function is not there, or is no tool."""
    return [
        FunctionTool(
            own_code.load(f"env.tools.functions.{name}", f"{function.module}:{name}"), timeout_s=function.timeout_s
        )
        for name, function in params.functions.items()
    ]


def require_own(params: EnvParams) -> None:
    """Raises ValueError for a function or class of the user's own that is not there, or is no tool."""
    own_tools(params.tools)
    for _, where, reference in _own(params):
        own_code.load(where, reference)
    own_sources(params)


def own_sources(params: EnvParams) -> dict[str, str]:
    """The sha256 of the source of each function, class and agent of the user's own; raises as `own_code.load`."""
    agents = {f"agent {name}": own_code.agent_hash(name, agent) for name, agent in params.agents.items()}
    return {title: own_code.source_hash(where, reference) for title, where, reference in _own(params)} | agents


def _own(params: EnvParams) -> Iterator[tuple[str, str, str]]:
    """For each function and class of the user's own a title, the key that names it, and its `module:name`."""
    for name, function in params.tools.functions.items():
        yield f"tool {name}", f"env.tools.functions.{name}", f"{function.module}:{name}"
    for name, box in params.toolbox.items():
        yield f"toolbox {name}", f"env.toolbox.{name}", box.class_
    for name, world in params.gymnasium.items():
        if ":" in world.observation:
            yield f"observation {name}", f"env.gymnasium.{name}.observation", world.observation


def use_of_tools(trajectories: Sequence[Trajectory], tools: Sequence[str]) -> Metrics:
    """For each tool `tool/<name>/calls`, per episode, and of its calls `ok_share` and `timeout_share`.

    Episodes that the world cut short do not count. A tool without calls has no shares, and calls of a name that is no
    tool's are left out.
    """
    episodes = sum(not trajectory.aborted for trajectory in trajectories)
    metrics = {}
    for name, calls in _calls(trajectories, tools).items():
        statuses = [call.status for call in calls]
        metrics[f"tool/{name}/calls"] = len(statuses) / max(episodes, 1)
        if statuses:
            metrics[f"tool/{name}/ok_share"] = statuses.count(CallStatus.OK) / len(statuses)
            metrics[f"tool/{name}/timeout_share"] = statuses.count(CallStatus.TIMEOUT) / len(statuses)
    return metrics


def latencies(trajectories: Sequence[Trajectory], tools: Sequence[str]) -> Metrics:
    """For each tool that was called the median and the 95th percentile of its calls' seconds.

    They are `tool/<name>/latency_p50_s` and `latency_p95_s`, over the calls of `use_of_tools`. Nothing of this is among
    the reproducible bits.
    """
    return {
        f"tool/{name}/latency_p{percent}_s": float(np.percentile([call.latency_s for call in calls], percent))
        for name, calls in _calls(trajectories, tools).items()
        if calls
        for percent in (50, 95)
    }


def _calls(trajectories: Sequence[Trajectory], tools: Sequence[str]) -> dict[str, list[Call]]:
    """The calls of each tool, in the episodes that the world did not cut short."""
    steps = [step for trajectory in trajectories if not trajectory.aborted for step in trajectory.steps]
    calls = [call for step in steps for call in step.calls]
    return {name: [call for call in calls if call.tool == name] for name in tools}
