"""The guard of the project's servers: a key, or this machine's programs alone; limits of size, connections and time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from hmac import compare_digest

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


class Guard:
    """Guards every route of a server whose clients are trusted with more than reading.

    With a key in the environment variable, only requests with that key pass. Without, only requests of this machine's
    programs pass: a web page names its origin, or another host.
    """

    def __init__(self, app: ASGIApp, variable: str) -> None:
        self._key = read_key(variable)
        self._app = app if self._key else by_name(app, LOOPBACK)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = None if scope["type"] == "lifespan" else self._refusal(scope["path"], Headers(scope=scope))
        await (response or self._app)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> JSONResponse | None:
        if not self._key:
            page = Refused("not for web pages", None, 403, "forbidden")
            return refusal(page, path) if "origin" in headers else None
        if compare_digest(key_of(headers).encode(), self._key.encode()):
            return None
        message = "the key is missing or not this server's; send it as a bearer token"
        return refusal(Refused(message, None, 401, "invalid_api_key"), path)


def key_of(headers: Headers) -> str:
    """The key of a request, which Anthropic's clients send in a header of their own."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (token if scheme == "Bearer" else "")


def by_name(app: ASGIApp, names: Sequence[str]) -> ASGIApp:
    """The app under these names of its machine only: a web page whose name was made to lead here gets 400."""
    hosts = [f"[{name}]" if ":" in name else name for name in names]  # an IPv6 address as in a URL
    return TrustedHostMiddleware(app, allowed_hosts=hosts)


class Unsignalled(uvicorn.Server):
    """A server that leaves the signals of its process to others."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class Bounded(H11Protocol):
    """A connection that ends after `seconds`, however slowly it is used; more than `most` connections end at once."""

    seconds = 60.0  # of a request with its answer
    most = 512  # connections
    again = False  # whether it takes further requests, each of so many seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        spare = len(self.connections) <= self.most
        self._end = self.loop.call_later(self.seconds if spare else 0, transport.abort)

    def on_response_complete(self) -> None:
        if self.again:
            self._end.cancel()
            self._end = self.loop.call_later(self.seconds, self.transport.abort)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(exc)


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


def configured(app: ASGIApp, host: str, port: int, connection: type[Bounded] = Bounded) -> uvicorn.Config:
    """The configuration of a server whose connections are `Bounded`, and carry one request each unless `again`."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=connection,
        ws="none",
        lifespan="off",
        headers=[] if connection.again else [("connection", "close")],
        timeout_keep_alive=int(connection.seconds),
        log_level="warning",
        timeout_graceful_shutdown=5,
    )
