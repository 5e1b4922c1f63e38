"""The search tool: what an index finds, as the policy reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

from agent_r1.records import Passage
from agent_r1.search.base import Search
from agent_r1.tools.base import FunctionTool, ToolError, ToolResult


def search_tool(index: Search, *, top_k: int, threads: Executor | None = None) -> FunctionTool:
    """A tool that shows the `top_k` best passages for a query.

    An index that computes answers on the spot; one that waits is asked in `threads`, by default those of the loop.
    """

    def found(query: str) -> ToolResult:
        if not query.strip():
            raise ToolError("the query is empty")
        [passages] = index.search([query], top_k)
        return ToolResult(
            text=render_passages(passages) or "nothing found", titles=tuple(passage.title for passage in passages)
        )

    def search(query: str) -> ToolResult:
        return found(query)

    async def waiting(query: str) -> ToolResult:
        return await asyncio.get_running_loop().run_in_executor(threads, found, query)

    function = waiting if index.waits else search
    function.__name__, function.__doc__ = "search", "Finds passages about a query."
    return FunctionTool(function)


def render_passages(passages: Sequence[Passage]) -> str:
    """One line per passage, `Title: text`; an empty string without passages."""
    return "\n".join(" ".join(f"{passage.title}: {passage.text}".split()) for passage in passages)
