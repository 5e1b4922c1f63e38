"""A server for an agent, with OpenAI's chat completions. Every request is an episode of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn import Server

from agent_r1.http.endpoint import ENDPOINT_KEY
from agent_r1.http.guard import Bounded, Guard, configured, read_body, refusal
from agent_r1.inspection.wire import Asked, Cards, Completion
from agent_r1.records import Outcome
from agent_r1.rollout.episode import PromptTooLong, StepView
from agent_r1.rollout.sampling import EngineError, EngineUnavailable
from agent_r1.training.agent import Agent

MAX_BODY_BYTES = 1 << 18  # more than the longest question that leaves room for an answer
MAX_EPISODES = 256  # at the same time
GONE = 499  # the status of an answer whose client is gone

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Lasting(Bounded):
    """Connections that may last as long as an episode."""

    seconds = 600.0


class Refused(Exception):
    """A request that is refused with an error."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.response = refusal(status, message, code)


class Service:
    """The routes of one agent, whose model name is `name`."""

    def __init__(self, agent: Agent, name: str, temperature: float) -> None:
        self._agent, self._name, self._temperature, self._running = agent, name, temperature, 0
        self.broken: EngineError | None = None  # the fault that ended the engine for good
        self.when_broken: Callable[[], None] = lambda: None

    def app(self) -> ASGIApp:
        """GET /v1/models and POST /v1/chat/completions, behind the Guard."""
        routes = [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        handlers = {HTTPException: _refused, Refused: _refused}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), ENDPOINT_KEY)

    async def models(self, _: Request) -> Response:
        return JSONResponse(Cards.of(self._name, self._agent.shared.limits).model_dump(by_alias=True))

    async def complete(self, request: Request) -> Response:
        asked = await self._read(request)
        steps = self._episode(asked)
        views = await _unless_left(request, _taken(steps, 1 if asked.stream else math.inf))
        if not views:
            return Response(status_code=GONE)
        completion = Completion(self._name)
        if not asked.stream:
            return JSONResponse(completion.whole(views))
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        events = _events(completion, views, steps, with_usage=with_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _read(self, request: Request) -> Asked:
        """Reads a request to this agent, or raises Refused."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json":
            raise Refused(415, f"send application/json, and not {kind[:80]!r}", "unsupported_media_type")
        body = await read_body(request, MAX_BODY_BYTES, "ask a shorter question")
        try:
            asked = Asked.read(body)
            if asked.model != self._name:
                message = f"there is no model {asked.model[:80]!r} here, only {self._name!r}"
                raise Refused(404, message, "model_not_found")
            asked.require_askable(self._temperature)
        except ValueError as fault:
            raise Refused(400, str(fault), "invalid_value") from None
        return asked

    async def _episode(self, asked: Asked) -> AsyncGenerator[StepView]:
        """The steps of an episode to its end. Raises Refused if it cannot start or is cut short."""
        if self._running >= MAX_EPISODES:
            raise Refused(429, f"{MAX_EPISODES} questions are being answered; come again", "rate_limit_exceeded")
        self._running += 1
        try:
            async with aclosing(self._agent.attend(asked.question, seed=asked.seed or 0)) as steps:
                async for view in steps:
                    if view.outcome is Outcome.ABORTED:
                        raise Refused(503, f"the episode was cut short: {view.fault}", "aborted")
                    yield view
        except PromptTooLong as fault:
            raise Refused(400, str(fault), "context_length_exceeded") from None
        except EngineError as fault:
            logger.error("an answer failed: %s", fault)
            if not isinstance(fault, EngineUnavailable):
                self.broken = fault
                self.when_broken()
            raise Refused(503, "the engine failed; the server's log says how", "engine_failed") from None
        finally:
            self._running -= 1


def serve(agent: Agent, name: str, *, host: str, port: int, temperature: float) -> None:
    """Answers until the process is told to end. Raises EngineError if the engine fails for good."""
    agent.shared.tools(0)  # a faulty tool is reported before the server starts
    service = Service(agent, name, temperature)
    server = Server(configured(service.app(), host, port, Lasting))
    service.when_broken = partial(setattr, server, "should_exit", True)
    logger.info("%s answers at http://%s:%d/v1", name, host, port)
    agent.shared.run(server.serve())
    if service.broken:
        raise service.broken


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work. Cancels it and returns None if the client leaves first."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
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


async def _taken(steps: AsyncGenerator[StepView], most: float) -> list[StepView]:
    """The first `most` steps, or all."""
    views: list[StepView] = []
    async for view in steps:
        views.append(view)
        if len(views) >= most:
            break
    return views


async def _events(
    completion: Completion, views: list[StepView], steps: AsyncGenerator[StepView], *, with_usage: bool
) -> AsyncIterator[str]:
    """The events of an episode from the last of `views` on, as its steps are taken."""
    async with aclosing(steps):
        yield _event(completion.step(views[-1]))
        try:
            async for view in steps:
                views.append(view)
                yield _event(completion.step(view))
        except Refused as refused:
            yield f"data: {bytes(refused.response.body).decode()}\n\n"
            return
    if with_usage:
        yield _event(completion.used(views))
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _refused(_: Request, refused: Exception) -> Response:
    """The answer to a refused request."""
    match refused:
        case Refused(response=response):
            return response
        case HTTPException(status_code=status, detail=detail):
            return refusal(status, detail, "invalid_request")
    raise refused
