"""The `search` tool."""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.records import Passage
from agent_r1.search.base import Search, SearchTimeout, SearchUnavailable
from agent_r1.tools.base import Tool, ToolError, ToolResult, ToolTimeout


def search_tool(index: Search, *, top_k: int) -> Tool:
    """A tool that shows the `top_k` best passages for a query."""

    def search(query: str) -> ToolResult:
        """Finds passages about a query."""
        if not query.strip():
            raise ToolError("the query is empty")
        try:
            [passages] = index.search([query], top_k)
        except SearchTimeout as fault:
            raise ToolTimeout("the search took too long") from fault
        except SearchUnavailable as fault:
            raise ToolError("the search does not answer") from fault
        return ToolResult(
            text=render_passages(passages) or "nothing found", titles=tuple(passage.title for passage in passages)
        )

    return Tool(search)


def render_passages(passages: Sequence[Passage]) -> str:
    """One line per passage, `Title: text`; an empty string without passages."""
    return "\n".join(" ".join(f"{passage.title}: {passage.text}".split()) for passage in passages)
