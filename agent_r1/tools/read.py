"""The tool that reads a passage to its end, part by part, however long it is."""

from __future__ import annotations

from concurrent.futures import Executor

from agent_r1.records import Passage
from agent_r1.search.base import Search
from agent_r1.tools.base import FunctionTool, ToolError, ToolResult
from agent_r1.tools.search import tool_on

_LOOKED_AT = 20  # passages that a search for a title finds


def read_tool(index: Search, *, part_characters: int, threads: Executor | None = None) -> FunctionTool:
    """A tool that shows parts of so many characters of the passage with a title."""

    def read(title: str, part: int = 1) -> ToolResult:
        """Shows a part of the passage with a title, which a search has shown; parts count from 1."""
        passage = _titled(index, title)
        text = " ".join(passage.text.split())
        parts = [text[start : start + part_characters] for start in range(0, len(text), part_characters)] or [""]
        if not 1 <= part <= len(parts):
            raise ToolError(f"the passage has {len(parts)} parts, and no part {part}")
        which = f" (part {part} of {len(parts)})" if len(parts) > 1 else ""
        return ToolResult(text=f"{_plain(passage.title)}{which}: {parts[part - 1]}", titles=(passage.title,))

    return tool_on(index, read, threads)


def _titled(index: Search, title: str) -> Passage:
    if not title.strip():
        raise ToolError("the title is empty")
    [found] = index.search([title], _LOOKED_AT)
    for passage in found:
        if _plain(passage.title) == _plain(title):
            return passage
    raise ToolError("there is no passage of this title; give one as a search shows it")


def _plain(title: str) -> str:
    return " ".join(title.split())
