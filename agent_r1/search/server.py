"""Serves an index to many clients: `agent-r1 serve-search --index FOLDER --port 8700`."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil
import uvicorn
from fastapi import FastAPI, HTTPException, Request

from agent_r1.http.client import BadAnswerError, Shape, parsed
from agent_r1.http.guard import by_name, configured, read_body
from agent_r1.params.sections import LOOPBACK
from agent_r1.search.base import Search
from agent_r1.search.index import describe, open_local
from agent_r1.search.remote import Health, ReadRequest, SearchReply, SearchRequest
from agent_r1.search.together import Together

MAX_BODY_BYTES = 1 << 21  # more than `BATCH` of the longest queries take

logger = logging.getLogger(__name__)


def create_app(index: Search, health: Health, hosts: Sequence[str] = LOOPBACK) -> FastAPI:
    """The server's three routes: POST /search, POST /read and GET /health, under its own names only."""
    app = FastAPI(title="agent_r1 search")
    app.add_middleware(by_name, names=hosts)
    together = Together(index)

    async def message(request: Request, kind: type[Shape]) -> Shape:
        body = await read_body(request, MAX_BODY_BYTES, "ask fewer queries at a time")
        try:
            return parsed(body, kind)
        except BadAnswerError as fault:
            raise HTTPException(422, str(fault)) from None

    @app.post("/read")
    async def read(request: Request) -> SearchReply:
        read_request = await message(request, ReadRequest)
        passages = await together.read(read_request.title)
        return SearchReply(index_hash=health.index_hash, results=[passages])

    @app.post("/search")
    async def search(request: Request) -> SearchReply:
        search_request = await message(request, SearchRequest)
        results = []
        for query in search_request.queries:  # one of each client, so that they take turns
            if await request.is_disconnected():
                break
            results.append(await together.search(query, search_request.k))
        return SearchReply(index_hash=health.index_hash, results=results)

    @app.get("/health")
    async def report() -> Health:
        return health

    return app


def own_names(host: str) -> list[str]:
    """The names and addresses under which clients ask a server at `host` of this machine."""
    if host in LOOPBACK:
        return [*LOOPBACK]
    addresses = [entry.address for card in psutil.net_if_addrs().values() for entry in card]
    return [*LOOPBACK, host, socket.gethostname(), socket.getfqdn(), *addresses]


def serve(folder: Path, host: str, port: int, names: Sequence[str] = ()) -> None:
    """Serves an index that the index stage has built, under further `names` too."""
    health = describe(folder)
    app = create_app(open_local(folder), health, [*own_names(host), *names])
    logger.info("serving the %s index of %d passages at port %d", health.kind, health.size, port)
    uvicorn.Server(configured(app, host, port)).run()
