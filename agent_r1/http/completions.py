"""Requests of OpenAI's chat completions: read from the wire, and refused as its client understands it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from agent_r1.http.dialects import DIALECTS
from agent_r1.http.dialects.conversation import Refused as Refused
from agent_r1.http.dialects.conversation import event as event
from agent_r1.http.dialects.conversation import read
from agent_r1.http.guard import read_body, refusal

GONE = 499  # the status of an answer whose client is gone
KEEP_ALIVE_S = 15.0  # between two signs of life in a stream

T = TypeVar("T")


class TextPart(BaseModel):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation. Other keys, such as a name, are ignored."""

    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Asked(BaseModel):
    """POST /v1/chat/completions. Fields that would change the answer are refused, not ignored."""

    model_config = ConfigDict(extra="allow")

    # Fields that frameworks send whether they are used or not: the values, beside null, that change nothing.
    neutral: ClassVar[dict[str, list[Any]]] = {
        "n": [1], "top_p": [1], "presence_penalty": [0], "frequency_penalty": [0], "logit_bias": [{}],
        "logprobs": [False], "top_logprobs": [0], "response_format": [{"type": "text"}], "modalities": [["text"]],
        "store": [False], "tools": [[]], "tool_choice": ["none", "auto"], "functions": [[]],
        "function_call": ["none", "auto"],
    }  # fmt: skip

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1024)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[str], Field(max_length=4)] | str | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    user: str | None = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Parses a request. Raises Refused that names the field that is wrong, or would change the answer."""
        request = read(cls, body)
        for name, value in (request.model_extra or {}).items():
            neutral = [None, *cls.neutral.get(name, ())]
            if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in neutral):
                choices = " or ".join(map(json.dumps, neutral))
                raise Refused(f"{name[:80]}: this agent takes {choices} alone; leave it out", name[:80])
        return request

    @property
    def most(self) -> int | None:
        """The tokens that an answer may have; None where the client says nothing."""
        return min(filter(None, (self.max_tokens, self.max_completion_tokens)), default=None)

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]


async def received(request: Request, most: int, remedy: str) -> bytes:
    """The body of a request of at most so many bytes; Refused unless it is JSON by its head."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/json":
        raise Refused(f"send application/json, not {kind[:80]!r}", None, 415, "unsupported_media_type")
    return await read_body(request, most, remedy)


def require_model(name: str, model: str) -> None:
    """Raises Refused if a request asks for another model than the server's own."""
    if name != model:
        raise Refused(f"there is no model {name[:80]!r} here, only {model!r}", "model", 404, "model_not_found")


async def answered(
    request: Request,
    work: asyncio.Future[T],
    write: Callable[[T], str | dict[str, Any]],
    fail: Callable[[Refused], str],
    leave: Callable[[], object],
    *,
    stream: bool,
) -> Response:
    """The answer to a request, written once its work is done. A stream that waits shows signs of life.

    What the work refuses is raised, or told by `fail` in a stream that has begun; `leave` is called if the client
    leaves before the work is done.
    """
    if await unless_left(request, asyncio.wait({work}, timeout=KEEP_ALIVE_S if stream else None)) is None:
        leave()
        return Response(status_code=GONE)
    if not work.done():
        return StreamingResponse(_alive(work, write, fail, leave), media_type="text/event-stream")
    content = write(work.result())
    return JSONResponse(content) if isinstance(content, dict) else Response(content, media_type="text/event-stream")


async def _alive(
    work: asyncio.Future[T],
    write: Callable[[T], str | dict[str, Any]],
    fail: Callable[[Refused], str],
    leave: Callable[[], object],
) -> AsyncIterator[str]:
    try:
        while not work.done():
            yield ": it is acting\n\n"
            await asyncio.wait({work}, timeout=KEEP_ALIVE_S)
        yield str(write(work.result()))
    except Refused as fault:
        yield fail(fault)
    finally:
        if not work.done():
            leave()


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work. Cancels it and returns None if the client leaves first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def refused(request: Request, fault: Exception) -> Response:
    """The answer to a request that is refused."""
    if isinstance(fault, HTTPException):
        paths = " or POST ".join(dialect.path for dialect in DIALECTS)
        ask = f"; ask GET /v1/models or POST {paths}" if fault.status_code in (404, 405) else ""
        fault = Refused(fault.detail + ask, None, fault.status_code, "invalid_request")
    if isinstance(fault, Refused):
        return refusal(fault, request.url.path)
    raise fault
