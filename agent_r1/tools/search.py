"""Tools over a search index: one finds passages, one reads all of a title to its end, however long it is."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from agent_r1.records import Passage
from agent_r1.search.base import Search, one_line
from agent_r1.search.together import Together
from agent_r1.tools.base import FunctionTool, ToolError, ToolResult


def search_tool(index: Search, *, top_k: int, threads: Executor | None = None) -> FunctionTool:
    """A tool that shows the `top_k` best passages for a query; it searches as `Together` does, in `threads`."""
    together = Together(index, threads)

    async def search(query: str) -> ToolResult:
        """Finds passages about a query."""
        if not query.strip():
            raise ToolError("the query is empty")
        passages = await together.search(query, top_k)
        return ToolResult(
            text=render_passages(passages) or "nothing found", titles=tuple(passage.title for passage in passages)
        )

    return FunctionTool(search, waits=index.waits)


def render_passages(passages: Sequence[Passage]) -> str:
    """One line per passage, `Title: text`; an empty string without passages."""
    return "\n".join(one_line(f"{passage.title}: {passage.text}") for passage in passages)


def read_tool(index: Search, *, part_characters: int, threads: Executor | None = None) -> FunctionTool:
    """A tool that shows parts of so many characters of the passages with a title, one after the other."""
    together = Together(index, threads)

    async def read(title: str, part: int = 1) -> ToolResult:
        """Shows a part of the passage with a title, which a search has shown; parts count from 1."""
        if not title.strip():
            raise ToolError("the title is empty")
        passages = await together.read(title)
        if not passages:
            raise ToolError("there is no passage of this title; give one as a search shows it")
        text = one_line(" ".join(passage.text for passage in passages))
        parts = [text[start : start + part_characters] for start in range(0, len(text), part_characters)] or [""]
        if not 1 <= part <= len(parts):
            raise ToolError(f"the passage has {len(parts)} parts, and no part {part}")
        place = f" (part {part} of {len(parts)})" if len(parts) > 1 else ""
        return ToolResult(text=f"{one_line(title)}{place}: {parts[part - 1]}", titles=(passages[0].title,))

    return FunctionTool(read, waits=index.waits)
