"""The guard of the project's servers: a key, or this machine's programs alone; limits of size, connections and time."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from agent_r1.http.client import read_key
from agent_r1.http.dialects import DIALECTS
from agent_r1.http.dialects.conversation import Refused
from agent_r1.params.sections import LOOPBACK

_AT_ONCE = 128  # connections that are taken up before the first of them passes the door; each has a file already
_LOOK_S = 0.1  # between two looks at strangers

logger = logging.getLogger(__name__)


class Guard:
    """Guards every route of a server whose clients are trusted with more than reading.

    With a key in the environment variable, only requests with that key pass. Without, only requests of this machine's
    programs pass: a web page names its origin, or another host.
    """

    def __init__(self, app: ASGIApp, variable: str) -> None:
        self._key = read_key(variable)
        self._app = app if self._key else for_programs(app)

    def opens(self, headers: Headers) -> bool:
        """Whether a request has the key, if one is asked for."""
        return not self._key or compare_digest(key_of(headers).encode(), self._key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] != "lifespan" and not self.opens(Headers(scope=scope)):
            message = "the key is missing or not this server's; send it as a bearer token"
            app = refusal(Refused(message, None, 401, "invalid_api_key"), scope["path"])
        await app(scope, receive, send)


def for_programs(app: ASGIApp) -> ASGIApp:
    """The app for this machine's programs alone: a web page names its origin, or another host."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        page = scope["type"] != "lifespan" and "origin" in Headers(scope=scope)
        refused = Refused("not for web pages", None, 403, "forbidden")
        await (refusal(refused, scope["path"]) if page else app)(scope, receive, send)

    return by_name(guarded, LOOPBACK)


def key_of(headers: Headers) -> str:
    """The key of a request, which Anthropic's clients send in a header of their own."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (token if scheme == "Bearer" else "")


def by_name(app: ASGIApp, names: Sequence[str]) -> ASGIApp:
    """The app under these names of its machine only: a web page whose name was made to lead here gets 400."""
    hosts = [f"[{name}]" if ":" in name else name for name in names]  # an IPv6 address as in a URL
    return TrustedHostMiddleware(app, allowed_hosts=hosts)


class Server(uvicorn.Server):
    """A server that says once a second that it lacks files for connections, and remembers it."""

    starved_s = 0.0  # of the loop's clock, up to which that was said; 0 where it never lacked any

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if "accept" not in context["message"]:
                loop.default_exception_handler(context)
            elif loop.time() >= self.starved_s:
                self.starved_s = loop.time() + 1
                logger.error("no connection can be taken up: %s", context.get("exception"))

        asyncio.get_running_loop().set_exception_handler(report)
        await super().startup(sockets)


class Unsignalled(Server):
    """A server that leaves the signals of its process to others."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


@dataclass(kw_only=True, eq=False)
class Door:
    """The limits of a server's connections. One is a stranger's until a complete head has passed `opens`.

    Beyond the limits the stranger who waits longest is turned out, so who shows a key at once is let in.
    """

    seconds: float = 60.0  # of a request with its answer
    most: int = 512  # connections; of this process's files half at most
    again: bool = False  # whether a connection takes further requests, each of so many seconds
    expected: int = 128  # clients at a time; four times as many strangers may wait
    patience_s: float = 5.0  # that a stranger may wait
    opens: Callable[[Headers], bool] = lambda _: True
    own: bool = False  # whether strangers of other accounts are turned out, where Linux tells whose a connection is
    strangers: dict[Bounded, None] = field(default_factory=dict)  # the one who waits longest is the first
    looking: bool = False

    def let_in(self, stranger: Bounded) -> None:
        """Takes up a connection, and turns out whoever is too many; strangers at the next look, when heads are read."""
        self.strangers[stranger] = None
        if len(stranger.connections) > min(self.most, _files() // 2):
            self._turn_out(next(iter(self.strangers)))
        if not self.looking:
            self.looking = True
            stranger.loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self.looking = False
        accounts = _accounts() if self.own and self.strangers else {}
        surplus = len(self.strangers) - min(4 * self.expected, _files() // 8)
        for place, stranger in enumerate([*self.strangers]):
            if place < surplus or accounts.get((stranger.client or ("", 0))[1], os.getuid()) != os.getuid():
                self._turn_out(stranger)

    def _turn_out(self, stranger: Bounded) -> None:
        del self.strangers[stranger]
        stranger.transport.abort()


def _files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _accounts() -> dict[int, int]:
    """The account of each TCP socket of this machine by its port."""
    files = [path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for path in files for line in path.read_text().splitlines()[1:]]
    return {int(row[1][-4:], 16): int(row[7]) for row in rows}


class Bounded(H11Protocol):
    """A connection that has come through a `Door`, and ends after its seconds, however slowly it is used."""

    def __init__(self, door: Door, *state: Any, **further: Any) -> None:
        super().__init__(*state, **further)
        self._door = door

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = self.loop.call_later(self._door.patience_s, transport.abort)
        self._door.let_in(self)

    def handle_events(self) -> None:
        super().handle_events()
        if self in self._door.strangers and self.headers and self._door.opens(Headers(raw=self.headers)):
            del self._door.strangers[self]
            self._extend()

    def on_response_complete(self) -> None:
        if self._door.again and self not in self._door.strangers:
            self._extend()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        self._door.strangers.pop(self, None)
        super().connection_lost(exc)

    def _extend(self) -> None:
        self._end.cancel()
        self._end = self.loop.call_later(self._door.seconds, self.transport.abort)


def refusal(fault: Refused, path: str = "") -> JSONResponse:
    """A refusal in the form of the path's dialect."""
    dialect = next((dialect for dialect in DIALECTS if dialect.path == path), DIALECTS[0])
    return JSONResponse(dialect.error(fault), fault.status)


async def read_body(request: Request, most: int, remedy: str) -> bytes:
    """The body of a request. Raises HTTPException 413 for more than `most` bytes, at once; 400 if it is cut off."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise HTTPException(413, f"a request has {most} bytes at most; {remedy}")
    except ClientDisconnect:  # which a server's log would show with its traceback
        raise HTTPException(400, "the request was cut off") from None
    return bytes(body)


def open_to_all(variable: str, host: str, risk: str) -> str:
    """The warning for a server without a key, else ""; ValueError if such a one would listen beyond this machine."""
    if read_key(variable):
        return ""
    risk = f"without {variable} all who reach this server may {risk}"
    if host not in LOOPBACK:
        raise ValueError(f"--host {host}: {risk}; set it to a key, here and for its clients, or leave --host out")
    return f"{risk}; it listens on {host} alone"


def configured(app: ASGIApp, host: str, port: int, door: Door) -> uvicorn.Config:
    """The configuration of a server with a door, whose connections carry one request each unless `again`."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=partial(Bounded, door),  # type: ignore[arg-type]
        backlog=_AT_ONCE,
        ws="none",
        lifespan="off",
        headers=[] if door.again else [("connection", "close")],
        timeout_keep_alive=int(door.seconds),
        log_level="error",  # strangers could fill the log with what they send
        timeout_graceful_shutdown=5,
    )
