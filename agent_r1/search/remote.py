"""An index that another process serves, and the messages between the two; see `agent_r1.serving.search_server`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Annotated

from pydantic import BaseModel, FailFast, Field

from agent_r1.http.client import Answer, BadAnswerError, Client, Retries, named_faults, read_key
from agent_r1.params.search import RemoteParams
from agent_r1.records import Passage
from agent_r1.search.base import Search, named_by_content, parted

SEARCH_KEY = "AGENT_R1_SEARCH_KEY"  # the key of a proxy before the server
NO_ROUTE = b'{"detail":"Not Found"}'  # the server's own 404
MAX_QUERY = 8192  # characters
BATCH = 32  # queries of a request: each has a time limit of its own, however many are asked at once
# DVC does not see that a server has changed.
ANEW = "run the index stage anew (`dvc repro --single-item --force index`)"


class SearchRequest(BaseModel):
    """POST /search"""

    queries: Annotated[list[Annotated[str, Field(max_length=MAX_QUERY)]], Field(max_length=1024), FailFast()]
    k: Annotated[int, Field(ge=1, le=1000)]


class ReadRequest(BaseModel):
    """POST /read"""

    title: Annotated[str, Field(max_length=MAX_QUERY)]


class SearchReply(BaseModel):
    """The answer to a SearchRequest, or to a ReadRequest."""

    index_hash: str
    results: Annotated[list[Annotated[list[Passage], FailFast()]], FailFast()]  # for each query, best first; of a title


class RetrieveRequest(BaseModel):
    """POST /retrieve, as Search-R1's own client sends it (github.com/PeterGriffinJin/Search-R1, generation.py)."""

    queries: Annotated[list[str], Field(max_length=1 << 14), FailFast()]
    topk: Annotated[int, Field(ge=0, le=1000)] | None = None  # None and 0: the server's own number
    return_scores: bool = False


class Document(BaseModel):
    """A passage as a row of wiki-18."""

    id: str | int | None = None
    contents: str  # the title, in quotation marks or without, a line break and the text


class Scored(BaseModel):
    """A document where scores were asked for."""

    document: Document
    score: float | None = None  # servers that ask the web give none


class RetrieveReply(BaseModel):
    """The answer to a RetrieveRequest."""

    result: Annotated[list[list[Scored | Document]], FailFast()]  # for each query, best first


class Health(BaseModel):
    """GET /health"""

    kind: str
    index_hash: str
    passages_hash: str  # of the Parquet file that the index was built from
    size: int  # passages


class RemoteIndex(Search):
    """A client of the search server. Queries go in requests of `BATCH`, and each request is tried `retries` times."""

    def __init__(self, params: RemoteParams, index_hash: str = "") -> None:
        """With a hash given, results of another index are refused."""
        self._index_hash = index_hash
        self._url = params.url
        self._who = f"the search server at {params.url}"
        self._client = Client(params.url, params.timeout_s, read_key(SEARCH_KEY))
        self._retries = Retries(self._who, params.retries, wait_s=params.backoff_s)

    @property
    def waits(self) -> bool:
        return True

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For each query, cut to MAX_QUERY characters, its best passages.

        Raises WorldFault if the server does not answer, or answers nonsense, after all retries, and ValueError if it
        refuses the request or serves another index.
        """
        cut = [query[:MAX_QUERY] for query in queries]
        requests = [SearchRequest(queries=cut[start : start + BATCH], k=k) for start in range(0, len(cut), BATCH)]
        with self._named():
            results = [asyncio.run(self._retries.run(partial(self._attempt, request))) for request in requests]
        return [*chain.from_iterable(results)]

    def read(self, title: str) -> list[Passage]:
        """The passages of a title, which is cut to MAX_QUERY characters. Raises as `search` does."""
        request = ReadRequest(title=title[:MAX_QUERY])
        with self._named(
            "it may be of an earlier version, without /read: start it anew, or set env.tools.read to null"
        ):
            reply = asyncio.run(self._retries.run(partial(self._reply, "/read", request)))
        return [*chain.from_iterable(reply.results)]

    def health(self) -> Health:
        """The server's description of its index; one attempt."""
        with self._named():
            return asyncio.run(self._ask("GET", "/health")).parse(Health)

    async def _ask(self, method: str, path: str, content: str | None = None) -> Answer:
        """The answer of a search server. A 404 that is not its own may pass: a proxy gives it when it has no server."""
        answer = await self._client.answer(method, path, content)
        if answer.status == 404 and answer.body != NO_ROUTE:
            raise ConnectionError(f"status 404, and not from a search server; check remote.url: {answer.reason}")
        return answer.require_ok()

    async def _reply(self, path: str, request: BaseModel) -> SearchReply:
        reply = (await self._ask("POST", path, request.model_dump_json())).parse(SearchReply)
        if self._index_hash and reply.index_hash != self._index_hash:
            raise ValueError(
                f"{self._who} serves index {reply.index_hash[:12]} now, not {self._index_hash[:12]}; serve that one, "
                f"or {ANEW}"
            )
        return reply

    async def _attempt(self, request: SearchRequest) -> list[list[Passage]]:
        results = await self._results(request)
        count = len(request.queries)
        sizes = [len(passages) for passages in results]
        if len(sizes) != count or any(size > request.k for size in sizes):
            raise BadAnswerError(f"it answered {count} queries for {request.k} passages each with {sizes}")
        return results

    async def _results(self, request: SearchRequest) -> list[list[Passage]]:
        return (await self._reply("/search", request)).results

    def _named(self, remedy: str = "check remote.url") -> AbstractContextManager[None]:
        return named_faults(self._who, "a search server's", lambda _: f"; {remedy}")


class Retriever(RemoteIndex):
    """A client of a server of Search-R1's, which has no hash and finds no titles."""

    def read(self, title: str) -> list[Passage]:
        return Search.read(self, title)

    def health(self) -> Health:
        """What is stated of the index, once the server has answered a search."""
        self.search(["Wikipedia"], 1)
        return Health(kind="retrieve", index_hash=self._index_hash, passages_hash="", size=0)

    async def _results(self, request: SearchRequest) -> list[list[Passage]]:
        """Passages beyond `k`, which servers that ask the web give, are left out."""
        body = RetrieveRequest(queries=request.queries, topk=request.k, return_scores=True)
        reply = (await self._ask("POST", "/retrieve", body.model_dump_json())).parse(RetrieveReply)
        return [self._ordered(documents)[: request.k] for documents in reply.result]

    def _ordered(self, documents: Sequence[Scored | Document]) -> list[Passage]:
        scores = [entry.score for entry in documents if isinstance(entry, Scored) and entry.score is not None]
        if scores != sorted(scores, reverse=True):
            raise BadAnswerError(f"its passages are not in the order of their scores: {scores[:10]}")
        return [_passage(entry.document if isinstance(entry, Scored) else entry) for entry in documents]


def _passage(document: Document) -> Passage:
    passage = named_by_content(*parted(document.contents))
    return passage if document.id is None else replace(passage, passage_id=str(document.id))


def connect(params: RemoteParams, index_hash: str = "") -> RemoteIndex:
    """The client of a search server by its protocol. With a hash given, results of another index are refused."""
    if params.protocol == "retrieve":
        return Retriever(params, params.version)
    return RemoteIndex(params, index_hash)
