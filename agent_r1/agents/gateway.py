"""The gateway: chat completions on loopback, by which agents outside ask the policy, with keys of each episode."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import Annotated, Any, Protocol, Self

from pydantic import Field
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agent_r1.agents.programs import Stated
from agent_r1.agents.session import Session, offered
from agent_r1.faults import ContextFull
from agent_r1.http.completions import ModelServer, answered, received, refused
from agent_r1.http.dialects.conversation import ChatRequest, Dialect, Refused, Reply, read
from agent_r1.http.guard import Door, Unsignalled, configured, for_programs, key_of
from agent_r1.records import Json
from agent_r1.rollout.episodes import Act

MODEL = "policy"  # the name of the only model
MAX_BODY_BYTES = 1 << 23
LARGE = 1 << 15  # bytes of a request from which on it is rendered in a thread: the loop goes on meanwhile
_RETRIED = "x-stainless-retry-count"  # by OpenAI's client

logger = logging.getLogger(__name__)


class Posted(Stated):
    """POST /v1/reward."""

    answer: Annotated[str, Field(max_length=1 << 16)] | None = None


@dataclass(eq=False, slots=True)
class Asking:
    """A request that is answered."""

    drawing: asyncio.Task[Reply | Refused]  # a refusal is a result: an exception would keep the request
    gone: bool = False  # whether the connection that asked it is


class OpenEpisode:
    """An episode at the gateway: its requests, and what its agent posted."""

    def __init__(self, session: Session, act: Act, episode: int, *, parallel: bool, parts: list[str]) -> None:
        self.session = session
        self.parts = parts
        self.posted: Posted | None = None
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # raises what ends the episode
        self._act = act
        self._episode = episode
        self._turn = nullcontext() if parallel else asyncio.Lock()
        self._placing = asyncio.Lock()
        self._asked = dict[bytes, list[Asking]]()
        self.stored = dict[str, Any]()  # what requests of Responses may name

    def of(self, _: ChatRequest) -> Self:
        """The episode of a request by its key."""
        return self

    def ask(self, chat_request: ChatRequest, body: bytes, *, again: bool) -> Asking:
        """The answer to a request; one that is sent `again`, or whose connection is gone, has its answer already."""
        same = self._asked.setdefault(blake2b(body).digest(), [])
        asking = same[-1] if again and same else next((twin for twin in same if twin.gone), None)
        if asking is None:
            asking = Asking(asyncio.create_task(self._draw(chat_request, large=len(body) > LARGE)))
            same.append(asking)
        asking.gone = False
        return asking

    async def _draw(self, chat_request: ChatRequest, *, large: bool) -> Reply | Refused:
        try:
            self.session.require_room(chat_request)
            async with self._turn:
                await asyncio.to_thread(offered, chat_request.spelled_schemas)  # keeps them: reading some takes seconds
                async with self._placing:
                    find = self.session.place
                    place = await asyncio.to_thread(find, chat_request) if large else find(chat_request)
                request, first = self.session.request(place, chat_request, self._episode)
                action = await self._act(request)
                return self.session.take(place, chat_request, request, first, action).reply(MODEL)
        except ContextFull as fault:
            return self.session.full(str(fault))
        except Refused as fault:
            return copy(fault)
        except Exception as fault:
            if not self.broken.done():
                self.broken.set_exception(fault)
            return Refused("the policy cannot answer any more", None, 503, "aborted")

    def close(self) -> None:
        """Ends the requests that are under way."""
        for asking in chain.from_iterable(self._asked.values()):
            asking.drawing.cancel()
        self.broken.cancel()


# Connections of many requests, which may wait for an episode's other ones.
Unhurried = partial(Door, seconds=3600.0, most=4096, again=True)


class Access(Protocol):
    """What a key opens."""

    stored: dict[str, Any]  # what requests of Responses may name

    def of(self, chat_request: ChatRequest, /) -> OpenEpisode:
        """The episode of a request."""
        ...


class Completions(ModelServer):
    """The routes by which agents ask one policy, by any name."""

    @abstractmethod
    def _access(self, request: Request) -> Access:
        """What the key of a request opens. Raises Refused for one that opens nothing."""

    async def models(self, request: Request) -> Response:
        self._access(request)
        name = request.path_params.get("name")
        card = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "agent_r1"}
        return JSONResponse(card if name else {"object": "list", "data": [card]})

    async def complete(self, dialect: Dialect, request: Request) -> Response:
        access = self._access(request)
        body = await received(request, MAX_BODY_BYTES, "send a shorter history")
        chat_request = dialect.read(body, access.stored)
        self.tell(chat_request)
        again = request.headers.get(_RETRIED, "0") != "0"
        asking = access.of(chat_request).ask(chat_request, body, again=again)

        def write(reply: Reply | Refused) -> list[str] | Json:
            if isinstance(reply, Refused):
                raise copy(reply)
            access.stored |= dialect.stored(chat_request, reply)
            return dialect.events(chat_request, reply) if chat_request.stream else dialect.write(chat_request, reply)

        leave = partial(setattr, asking, "gone", True)
        return await answered(request, asking.drawing, write, dialect.failure, leave, stream=chat_request.stream)


def application(routes: Sequence[Route]) -> Starlette:
    """The server of some routes, which refuses in the dialect of each."""
    return Starlette(routes=routes, exception_handlers={HTTPException: _refused, Refused: _refused})


class Gateway(Completions):
    """The server of a stage. A key opens the session of its own episode alone, while that is under way."""

    def __init__(self, expected: int) -> None:
        """So many episodes are `expected` at a time."""
        super().__init__()
        self._door = Unhurried(expected=expected, own=True, opens=self._opens)
        self._opened = dict[str, OpenEpisode]()
        self._rewards = dict[str, OpenEpisode]()
        self._over = set[str]()

    async def __aenter__(self) -> Self:
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        self.server = Unsignalled(configured(self.app(), "127.0.0.1", 0, self._door))
        self._serving = asyncio.create_task(self.server.serve([listening]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.should_exit = self.server.force_exit = True
        await self._serving

    def app(self) -> ASGIApp:
        return for_programs(application([*self.routes, Route("/v1/reward", self._reward, methods=["POST"])]))

    def _opens(self, headers: Headers) -> bool:
        return key_of(headers) in {*self._opened, *self._rewards}

    def open(self, episode: OpenEpisode) -> tuple[str, str]:
        """The client's key and the reward's of an episode that begins."""
        key, reward_key = (secrets.token_urlsafe(32) for _ in range(2))
        self._opened[key] = episode
        self._rewards[reward_key] = episode
        return key, reward_key

    def close(self, key: str, reward_key: str) -> None:
        """Ends an episode's session."""
        self._opened.pop(key).close()
        del self._rewards[reward_key]
        self._over |= {key, reward_key}

    def _of(self, request: Request, episodes: dict[str, OpenEpisode], which: str) -> OpenEpisode:
        """The episode of a request's key."""
        key = key_of(request.headers)
        if key in self._over:
            raise Refused("the episode of this key is over", None, 401, "episode_over")
        if key not in episodes:
            raise Refused(f"this needs the {which} key of an episode, as a bearer token", None, 401, "invalid_api_key")
        return episodes[key]

    def _access(self, request: Request) -> OpenEpisode:
        return self._of(request, self._opened, "client's")

    async def _reward(self, request: Request) -> Response:
        episode = self._of(request, self._rewards, "reward")
        posted = read(Posted, await received(request, MAX_BODY_BYTES, "a reward is short"))
        if episode.posted:
            raise Refused("this episode has its reward already, which is posted once", None, 409, "posted")
        for name in [name for name in posted.parts if name not in episode.parts]:
            raise Refused(f"parts: {name[:80]!r} is not declared in the agent's `rewards`", "parts")
        episode.posted = posted
        return JSONResponse({})


def _refused(request: Request, fault: Exception) -> Response:
    response = refused(request, fault)
    response.headers["x-should-retry"] = "false"  # else OpenAI's client repeats 409 and 503
    return response
