"""What an MCP server is handed and what it answers: bounded while it is read, and taken as text."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TextIO, cast

import httpx2
from mcp_types import (
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from agent_r1.harmless import harmless, without_password
from agent_r1.http.client import require_plain, require_small
from agent_r1.records import CallStatus
from agent_r1.tools.base import ToolResult

EXCERPT = 500  # characters of a server's own words in a message


class Bounded(httpx2.AsyncHTTPTransport):
    """Cuts what a server answers a request with while it is read; of what it says unasked there is no end."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if request.method == "POST":
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


def handed_on(variables: Sequence[str]) -> dict[str, str]:
    if missing := [name for name in variables if name not in os.environ]:
        raise ValueError(f"env.tools.mcp hands on {missing[0]}, which is not set in the environment; set it")
    return {name: os.environ[name] for name in variables}


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
