"""A model behind HTTP: requests in any dialect, read from the wire and refused as their clients understand it."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agent_r1.http.dialects import DIALECTS
from agent_r1.http.dialects.conversation import ChatRequest, Dialect, Refused
from agent_r1.http.guard import read_body, refusal
from agent_r1.records import Json

GONE = 499  # the status of an answer whose client is gone
KEEP_ALIVE_S = 15.0  # between two signs of life in a stream
ACTING = ": it is acting\n\n"  # such a sign

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ModelServer(ABC):
    """The routes by which one model is asked."""

    def __init__(self) -> None:
        self._unapplied = set[str]()  # fields that were said to change nothing

    @property
    def routes(self) -> list[Route]:
        """GET /v1/models, GET /v1/models/NAME and a POST for each dialect."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.models, methods=["GET"]),
            *(Route(dialect.path, partial(self.complete, dialect), methods=["POST"]) for dialect in DIALECTS),
        ]

    @abstractmethod
    async def models(self, request: Request) -> Response:
        """The list of the only model, or its card."""

    @abstractmethod
    async def complete(self, dialect: Dialect, request: Request) -> Response:
        """The answer to a request."""

    def tell(self, chat_request: ChatRequest) -> None:
        """Says once of each field that it changes nothing."""
        names = sorted(chat_request.unapplied - self._unapplied)
        if names:
            self._unapplied.update(names)
            logger.warning("a client sends %s, which changes nothing: sampling is as it is set up", ", ".join(names))


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
    write: Callable[[T], list[str] | Json],
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

    async def late() -> AsyncIterator[str]:
        try:
            while not work.done():
                yield ACTING
                await asyncio.wait({work}, timeout=KEEP_ALIVE_S)
            for part in write(work.result()):
                yield part
        except Refused as fault:
            yield fail(fault)
        finally:
            if not work.done():
                leave()

    if not work.done():
        return StreamingResponse(late(), media_type="text/event-stream")
    content = write(work.result())
    if isinstance(content, dict):
        return JSONResponse(content)
    return Response("".join(content), media_type="text/event-stream")


async def lively(steps: AsyncGenerator[T]) -> AsyncGenerator[T | None]:
    """The steps as they come, and None where the next one is so late that a stream has to show a sign of life."""
    coming: asyncio.Task[T] | None = None
    try:
        while True:
            coming = asyncio.create_task(anext(steps))
            while not (await asyncio.wait({coming}, timeout=KEEP_ALIVE_S))[0]:
                yield None
            yield coming.result()
    except StopAsyncIteration:
        return
    finally:
        if coming:
            coming.cancel()
            await asyncio.wait({coming})


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
