"""What an MCP server is handed and what it answers: bounded while it is read, and taken as text."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TextIO, cast

import httpx2
from mcp_types import (
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ListToolsResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)

from agent_r1.harmless import harmless, without_password
from agent_r1.http.client import require_plain, require_small
from agent_r1.records import CallStatus
from agent_r1.tools.base import Schema, ToolResult, function_schema

EXCERPT = 500  # characters of a server's own words in a message
MAX_TOOLS = 64
SESSION_LOST = 40_404  # in place of a server's code: it does not know the session of a request, and did nothing
_LOST = {"code": SESSION_LOST, "message": "the server does not know the session"}


class Bounded(httpx2.AsyncHTTPTransport):
    """Cuts the answer to a request while it is read; what a server says unasked has no end.

    By the protocol, 404 to a request of a session says that the server does not know the session.
    """

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if request.method == "POST":
            if response.status_code == httpx2.codes.NOT_FOUND and "mcp-session-id" in request.headers:
                await response.aclose()
                return httpx2.Response(httpx2.codes.NOT_FOUND, json={"jsonrpc": "2.0", "id": None, "error": _LOST})
            require_plain(response.headers)
            response.stream = _Counted(cast("httpx2.AsyncByteStream", response.stream))
        return response


class _Counted(httpx2.AsyncByteStream):
    """The bytes of an answer, as long as it is small enough."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._stream:
            size += len(piece)
            require_small(size)
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


@contextlib.contextmanager
def log_file() -> Iterator[TextIO]:
    """A file for what a command says beside its answers, which goes with it."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        yield cast(TextIO, log)


def last_words(log: TextIO) -> str:
    """The end of a message about a command, with the end of its log."""
    log.seek(0)
    words = harmless(log.read()[-EXCERPT:]).strip()
    return f"; its last words: {words}" if words else ""


def handed_on(variables: Sequence[str]) -> dict[str, str]:
    if missing := [name for name in variables if name not in os.environ]:
        raise ValueError(f"env.tools.mcp hands on {missing[0]}, which is not set in the environment; set it")
    return {name: os.environ[name] for name in variables}


async def listed(list_tools: Callable[..., Awaitable[ListToolsResult]], names: Sequence[str] | None) -> list[Schema]:
    """The schemas of a server's tools of these names, or of all; a ValueError says why they cannot be offered."""
    tools: list[Tool] = []
    cursor = None
    while page := await list_tools(cursor=cursor):
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None or len(tools) > MAX_TOOLS or not page.tools:
            break
    known = [tool.name for tool in tools]
    if missing := [name for name in names or () if name not in known]:
        raise ValueError(f"it has no tool {missing[0]!r}, only {', '.join(known)[:EXCERPT]}")
    chosen = [tool for tool in tools if names is None or tool.name in names]
    if not 0 < len(chosen) <= MAX_TOOLS:
        raise ValueError(f"it offers {len(chosen)} tools, and not 1 to {MAX_TOOLS}; name some under its key tools")
    return [function_schema(tool.name, tool.description or "", tool.input_schema) for tool in chosen]


def as_result(result: CallToolResult) -> ToolResult:
    """Its texts; of what is no text, that it was left out. Structured content where there is nothing else."""
    text = "\n".join(_texts(result))
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return ToolResult(text=text, call_status=CallStatus.FAILED if result.is_error else CallStatus.OK)


def _texts(result: CallToolResult) -> Iterator[str]:
    for block in result.content:
        match block:
            case TextContent():
                yield block.text
            case EmbeddedResource(resource=TextResourceContents() as resource):
                yield resource.text
            case EmbeddedResource():
                yield f"[a file ({block.resource.mime_type or 'binary'}) left out]"
            case ImageContent():
                yield f"[an image ({block.mime_type}) left out]"
            case AudioContent():
                yield f"[a sound ({block.mime_type}) left out]"
            case ResourceLink():
                yield f"[a link to {block.name}: {block.uri}]"


def said(fault: BaseException) -> str:
    """What is at the bottom of a fault, in a line."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return harmless(without_password(f"{type(fault).__name__}: {fault}"[:EXCERPT])).rstrip(": ")
