"""The gateway without episodes: a trained policy for an agent outside, rendered as it was in training."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Self

from starlette.requests import Request

from agent_r1.agents.gateway import MODEL, Completions, OpenEpisode, Unhurried, application
from agent_r1.agents.session import Session
from agent_r1.http.dialects.conversation import ChatRequest
from agent_r1.http.endpoint import ENDPOINT_KEY
from agent_r1.http.guard import Guard, Server, configured
from agent_r1.params.agents import AgentParams
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import nearest
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import PLAY
from agent_r1.rollout.episodes import Act, at_once
from agent_r1.rollout.sampling import EngineUnavailable, Sampler

MOST_CONVERSATIONS = 256
MOST_ACTIONS = 128
_MOST_STORED = 1024  # responses and items
_UNLIMITED = 1 << 31

logger = logging.getLogger(__name__)


class Conversations(Completions):
    """A policy for all who have the server's key.

    A conversation is known by its tools and its messages before the first answer. What the policy said in it is read
    again as it was sampled. Only the last `MOST_CONVERSATIONS` are kept, each for `MOST_ACTIONS`; what the policy said
    earlier is read as text.
    """

    def __init__(self, chat: Chat, limits: EnvParams, agent: AgentParams, act: Act) -> None:
        super().__init__()
        self.stored = dict[str, Any]()
        self._chat = chat
        self._agent = agent
        self._act = act
        self._limits = limits.model_copy(update={"max_steps": _UNLIMITED})
        self._episodes = dict[str, OpenEpisode]()  # the one that was asked last stands last
        self.broken: BaseException | None = None  # the fault that ended the engine for good
        self.when_broken: Callable[[], None] = lambda: None

    def app(self) -> Guard:
        return Guard(application(self.routes), ENDPOINT_KEY)

    def _access(self, request: Request) -> Self:
        return self

    def of(self, chat_request: ChatRequest) -> OpenEpisode:
        for oldest in [*self.stored][:-_MOST_STORED]:
            del self.stored[oldest]
        opening = takewhile(lambda message: message.role != "assistant", chat_request.messages)
        opening_text = json.dumps([chat_request.tools, *opening])
        name = blake2b(opening_text.encode(), digest_size=16).hexdigest()
        episode = self._episodes.pop(name, None)
        if episode is None or len(episode.session.drawn) >= MOST_ACTIONS:
            session = Session(self._chat, self._limits, self._agent, (0, 0, name, 0), PLAY)
            episode = OpenEpisode(session, self._act, 0, parallel=self._agent.parallel, parts=[])
            episode.broken.add_done_callback(self._broke)
        self._episodes[name] = episode
        if len(self._episodes) > MOST_CONVERSATIONS:
            del self._episodes[next(iter(self._episodes))]
        return episode

    def _broke(self, ending: asyncio.Future[None]) -> None:
        fault = ending.exception()
        logger.error("an answer failed: %s", fault)
        if not isinstance(fault, EngineUnavailable):
            self.broken = fault
            self.when_broken()


def declared_as(name: str | None, limits: EnvParams) -> AgentParams:
    """The declaration of an agent, or of the one that answers questions. Raises ValueError if there is none."""
    name = name or limits.agent
    if name is None:
        raise ValueError("env.agent is null; name one of env.agents with --agent: it says how requests are read")
    if name not in limits.agents:
        raise ValueError(f"env.agents declares no {name!r}{nearest(name, limits.agents) if limits.agents else ''}")
    return limits.agents[name]


def serve(sampler: Sampler, chat: Chat, limits: EnvParams, agent: AgentParams, *, host: str, port: int) -> None:
    """Answers until the process is told to end. Raises EngineError if the engine fails for good."""
    conversations = Conversations(chat, limits, agent, at_once(sampler))
    app = conversations.app()
    server = Server(configured(app, host, port, Unhurried(opens=app.opens)))
    conversations.when_broken = partial(setattr, server, "should_exit", True)
    logger.info("the model %s answers at http://%s:%d/v1", MODEL, host, port)
    server.run()
    if conversations.broken:
        raise conversations.broken
