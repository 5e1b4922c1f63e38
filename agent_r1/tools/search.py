"""The search tool: what an index finds, as the policy reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial, wraps
from typing import Any

from agent_r1.records import Passage
from agent_r1.search.base import Search
from agent_r1.tools.base import FunctionTool, ToolError, ToolResult


def search_tool(index: Search, *, top_k: int, threads: Executor | None = None) -> FunctionTool:
    """A tool that shows the `top_k` best passages for a query."""

    def search(query: str) -> ToolResult:
        """Finds passages about a query."""
        if not query.strip():
            raise ToolError("the query is empty")
        [passages] = index.search([query], top_k)
        return ToolResult(
            text=render_passages(passages) or "nothing found", titles=tuple(passage.title for passage in passages)
        )

    return tool_on(index, search, threads)


def tool_on(index: Search, function: Callable[..., ToolResult], threads: Executor | None) -> FunctionTool:
    """A tool of a function that asks an index: on the spot; where that waits, in `threads`, by default the loop's."""
    if not index.waits:
        return FunctionTool(function)

    @wraps(function)
    async def elsewhere(**arguments: Any) -> ToolResult:
        return await asyncio.get_running_loop().run_in_executor(threads, partial(function, **arguments))

    return FunctionTool(elsewhere)


def render_passages(passages: Sequence[Passage]) -> str:
    """One line per passage, `Title: text`; an empty string without passages."""
    return "\n".join(" ".join(f"{passage.title}: {passage.text}".split()) for passage in passages)
