"""A server for an agent, in every dialect. Each request is an episode of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from agent_r1.http.completions import (
    ACTING,
    GONE,
    ModelServer,
    lively,
    received,
    refused,
    require_model,
    unless_left,
)
from agent_r1.http.dialects.conversation import Dialect, Refused
from agent_r1.http.endpoint import ENDPOINT_KEY
from agent_r1.http.guard import Door, Guard, Server, configured
from agent_r1.records import Outcome
from agent_r1.rollout.episode import PromptTooLong, StepView
from agent_r1.rollout.sampling import EngineError, EngineUnavailable
from agent_r1.serving.agent import Agent
from agent_r1.serving.wire import Card, Completion, Limits, Questioned

MAX_BODY_BYTES = 1 << 18  # more than the longest question that leaves room for an answer
MAX_EPISODES = 256  # at the same time
Lasting = partial(Door, seconds=600.0)  # connections that may last as long as an episode

logger = logging.getLogger(__name__)


class Service(ModelServer):
    """The routes of one agent, whose model name is `name`."""

    def __init__(self, agent: Agent, name: str) -> None:
        super().__init__()
        self._agent = agent
        self._name = name
        self._running = 0
        self._card = Card(id=name, agent_r1=Limits.of(agent.shared.limits)).model_dump(by_alias=True)
        self.broken: EngineError | None = None  # the fault that ended the engine for good
        self.when_broken: Callable[[], None] = lambda: None

    def app(self) -> Guard:
        """GET /v1/models, GET /v1/models/NAME and a POST for each dialect, behind the Guard."""
        handlers = {HTTPException: refused, Refused: refused}
        return Guard(Starlette(routes=self.routes, exception_handlers=handlers), ENDPOINT_KEY)

    async def models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [self._card]})
        require_model(name, self._name)
        return JSONResponse(self._card)

    async def complete(self, dialect: Dialect, request: Request) -> Response:
        dialogue = await self._read(dialect, request)
        steps = self._episode(dialogue)
        completion = Completion(dialogue)
        stream = dialogue.request.stream
        views = await unless_left(request, _taken(steps, 1 if stream else math.inf))
        if not views:
            return Response(status_code=GONE)
        if stream:
            events = _events(dialect, completion, views, steps)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        return JSONResponse(dialect.write(dialogue.request, completion.reply(views)) | completion.extra(views))

    async def _read(self, dialect: Dialect, request: Request) -> Questioned:
        """Reads a request to this agent, or raises Refused."""
        dialogue = Questioned(dialect.read(await received(request, MAX_BODY_BYTES, "ask a shorter question"), {}))
        require_model(dialogue.request.model, self._name)
        dialogue.require_askable()
        self.tell(dialogue.request)
        return dialogue

    async def _episode(self, dialogue: Questioned) -> AsyncGenerator[StepView]:
        """The steps of an episode to its end. Raises Refused if it cannot start or is cut short."""
        if self._running >= MAX_EPISODES:
            raise Refused(f"{MAX_EPISODES} questions are being answered; come again", None, 429, "rate_limit_exceeded")
        earlier = dialogue.exchanges(self._agent.shared.limits.answers)
        attending = self._agent.attend(
            dialogue.question, seed=dialogue.request.seed or 0, most=dialogue.request.most, earlier=earlier
        )
        self._running += 1
        try:
            async with aclosing(attending) as steps:
                async for view in steps:
                    if view.outcome is Outcome.ABORTED:
                        logger.error("an episode was cut short: %s", view.fault)
                        raise Refused("a server that the agent's tools ask is down; come again", None, 503, "aborted")
                    yield replace(view, answer=dialogue.before_stop(view.answer))
        except PromptTooLong as fault:
            message = f"the question has {fault.tokens} tokens with the agent's prompt, and the limit is {fault.most}"
            raise Refused(f"{message}; ask a shorter one", "messages", 400, "context_length_exceeded") from None
        except EngineError as fault:
            logger.error("an answer failed: %s", fault)
            if not isinstance(fault, EngineUnavailable):
                self.broken = fault
                self.when_broken()
            raise Refused("the agent failed to answer; come again", None, 503, "engine_failed") from None
        finally:
            self._running -= 1


def serve(agent: Agent, name: str, *, host: str, port: int) -> None:
    """Answers until the process is told to end. Raises EngineError if the engine fails for good."""
    agent.shared.tools(0)  # a faulty tool is reported before the server starts
    service = Service(agent, name)
    app = service.app()
    server = Server(configured(app, host, port, Lasting(opens=app.opens)))
    service.when_broken = partial(setattr, server, "should_exit", True)
    logger.info("%s answers at http://%s:%d/v1", name, host, port)
    agent.shared.run(server.serve())
    if service.broken:
        raise service.broken


async def _taken(steps: AsyncGenerator[StepView], most: float) -> list[StepView]:
    """The first `most` steps, or all."""
    views: list[StepView] = []
    async for view in steps:
        views.append(view)
        if len(views) >= most:
            break
    return views


async def _events(
    dialect: Dialect, completion: Completion, views: list[StepView], steps: AsyncGenerator[StepView]
) -> AsyncIterator[str]:
    """The events of an episode from the first of `views` on, as its steps are taken."""
    events = completion.events(dialect, views)
    yield "".join(events)
    async with aclosing(steps), aclosing(lively(steps)) as coming:
        try:
            async for view in coming:
                if view is None:
                    yield ACTING
                    continue
                sent = len(events)
                views.append(view)
                events = completion.events(dialect, views)
                yield "".join(events[sent:])
        except Refused as fault:
            yield dialect.failure(fault)
