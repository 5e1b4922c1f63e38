"""Serves an index to many clients: `agent-r1 serve_search --index FOLDER --port 8700`."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil
import uvicorn
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, HTTPException, Request
from starlette.middleware.trustedhost import TrustedHostMiddleware

from agent_r1.http.client import LOOPBACK, Answer, BadAnswerError
from agent_r1.http.guard import configured, read_body
from agent_r1.search.base import Search
from agent_r1.search.index import describe, open_local
from agent_r1.search.remote import Health, SearchReply, SearchRequest

MAX_BODY_BYTES = 1 << 21  # more than `BATCH` of the longest queries take

logger = logging.getLogger(__name__)


def create_app(index: Search, health: Health, hosts: Sequence[str] = LOOPBACK) -> FastAPI:
    """The server's two routes: POST /search and GET /health, under one of its names only.

    A page in a browser whose name was made to lead here sends its own name, and gets 400.
    """
    app = FastAPI(title="agent_r1 search")
    names = [f"[{name}]" if ":" in name else name for name in hosts]  # as a URL has an IPv6 address
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=names)
    one_at_a_time = CapacityLimiter(1)  # tokenizers are not made for threads; query by query, so that all have a turn

    @app.post("/search")
    async def search(request: Request) -> SearchReply:
        asked = _parse(await read_body(request, MAX_BODY_BYTES, "ask fewer queries at a time"))
        results = []
        for query in asked.queries:
            if await request.is_disconnected():
                break
            results += await to_thread.run_sync(index.search, [query], asked.k, limiter=one_at_a_time)
        return SearchReply(index_hash=health.index_hash, results=results)

    @app.get("/health")
    async def report() -> Health:
        return health

    return app


def _parse(body: bytes) -> SearchRequest:
    try:
        return Answer(200, body).parse(SearchRequest)
    except BadAnswerError as fault:
        raise HTTPException(422, str(fault)) from None


def own_names(host: str) -> list[str]:
    """The names and addresses of this machine under which a server at `host` is asked."""
    if host in LOOPBACK:
        return [*LOOPBACK]
    addresses = [each.address for card in psutil.net_if_addrs().values() for each in card]
    return [*LOOPBACK, host, socket.gethostname(), socket.getfqdn(), *addresses]


def serve(folder: Path, host: str, port: int, names: Sequence[str] = ()) -> None:
    """Serves an index that the index stage has built; `names` are further ones that clients ask for it by."""
    health = describe(folder)
    app = create_app(open_local(folder), health, [*own_names(host), *names])
    logger.info("serving the %s index of %d passages at port %d", health.kind, health.size, port)
    uvicorn.Server(configured(app, host, port)).run()
