"""Serves an index to many clients: `agent-r1 serve-search --index FOLDER --port 8700`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from fastapi import FastAPI, HTTPException, Request

from agent_r1.http.client import BadAnswerError, Shape, parsed
from agent_r1.http.guard import Door, Server, by_name, configured, read_body
from agent_r1.params.sections import LOOPBACK
from agent_r1.records import Passage
from agent_r1.search.base import Search, one_line
from agent_r1.search.index import describe, open_local
from agent_r1.search.remote import (
    MAX_QUERY,
    Document,
    Health,
    ReadRequest,
    RetrieveReply,
    RetrieveRequest,
    Scored,
    SearchReply,
    SearchRequest,
)
from agent_r1.search.together import Together

SHARE = 8  # queries of a request that are searched before those of the next
RETRIEVE_TOPK = 3  # passages where Search-R1's client names no number, as of its own server
MAX_BODY_BYTES = 1 << 21  # more than `BATCH` of the longest queries take

logger = logging.getLogger(__name__)


def create_app(index: Search, health: Health, hosts: Sequence[str] = LOOPBACK) -> FastAPI:
    """The routes POST /search, POST /read, POST /retrieve and GET /health, under the server's own names only."""
    app = FastAPI(title="agent_r1 search")
    app.add_middleware(by_name, names=hosts)
    together = spread(index) if health.kind == "bm25" else Together(index)

    async def message(request: Request, kind: type[Shape]) -> Shape:
        body = await read_body(request, MAX_BODY_BYTES, "ask fewer queries at a time")
        try:
            return parsed(body, kind)
        except BadAnswerError as fault:
            raise HTTPException(422, str(fault)) from None

    async def ranked(request: Request, queries: Sequence[str], k: int) -> list[list[Passage]]:
        results = []
        for first in range(0, len(queries), SHARE):  # so that clients take turns
            if await request.is_disconnected():
                break
            results += await asyncio.gather(*(together.search(query, k) for query in queries[first : first + SHARE]))
        return results

    @app.post("/read")
    async def read(request: Request) -> SearchReply:
        read_request = await message(request, ReadRequest)
        passages = await together.read(read_request.title)
        return SearchReply(index_hash=health.index_hash, results=[passages])

    @app.post("/search")
    async def search(request: Request) -> SearchReply:
        search_request = await message(request, SearchRequest)
        results = await ranked(request, search_request.queries, search_request.k)
        return SearchReply(index_hash=health.index_hash, results=results)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> RetrieveReply:
        """Search-R1's: a row of passages for each query, which is cut to MAX_QUERY characters."""
        retrieve_request = await message(request, RetrieveRequest)
        queries = [query[:MAX_QUERY] for query in retrieve_request.queries]
        results = await ranked(request, queries, retrieve_request.topk or RETRIEVE_TOPK)
        return RetrieveReply(result=[in_wiki_form(passages, retrieve_request.return_scores) for passages in results])

    @app.get("/health")
    async def report() -> Health:
        return health

    return app


def spread(index: Search) -> Together:
    """An index that may be asked in several threads, on all cores: a query in each, first come, first served."""
    return Together(index, ThreadPoolExecutor(len(os.sched_getaffinity(0)), "search"), size=1)


def in_wiki_form(passages: Sequence[Passage], scored: bool) -> list[Scored | Document]:
    """Passages as rows of wiki-18; a score is 1 / rank, since rankings of this project have none."""
    documents = [Document(id=row.passage_id, contents=f'"{one_line(row.title)}"\n{row.text}') for row in passages]
    if not scored:
        return [*documents]
    return [Scored(document=document, score=1 / rank) for rank, document in enumerate(documents, start=1)]


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
    Server(configured(app, host, port, Door())).run()
