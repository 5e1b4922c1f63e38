"""An index that another process serves, and what the two say to each other; see `agent_r1.search.server`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Annotated, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from agent_r1.params.stages import RemoteParams
from agent_r1.records import Passage
from agent_r1.search.base import Search, SearchTimeout, SearchUnavailable


class SearchRequest(BaseModel):
    """POST /search"""

    queries: Annotated[list[str], Field(max_length=1024)]
    k: Annotated[int, Field(ge=1, le=1000)]


class SearchReply(BaseModel):
    """The answer to it."""

    index_hash: str
    results: list[list[Passage]]  # for each query, best first


class Health(BaseModel):
    """GET /health"""

    kind: str
    index_hash: str
    passages_hash: str  # of the Parquet file that the index was built from
    size: int  # passages


BATCH = 32  # queries of a request: every one has its own time limit, however many are asked at once
BUSY = {408, 429}  # besides 5xx: the server, or what stands before it, asks to come again

Reply = TypeVar("Reply", Health, SearchReply)

logger = logging.getLogger(__name__)


class Remote(Search):
    """A client of the search server.

    Queries go in requests of `BATCH`. An attempt at one that fails is made again, `retries` times, after a wait that
    doubles. Once all have failed the server is taken to be down: until it answers again a search makes one attempt, so
    that an episode full of searches does not wait for each.
    """

    def __init__(self, params: RemoteParams, index_hash: str = "") -> None:
        """A client; where a hash is given, results of another index are refused."""
        self._params = params
        self._index_hash = index_hash
        self._tls = httpx.create_ssl_context()  # takes longer than a search
        self._down = False

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For each query its best passages.

        Raises SearchTimeout if the server took too long, every time, SearchUnavailable if it does not answer, or with
        nonsense, every time, and ValueError if it refuses the request, or serves another index.
        """
        batches = [list(queries[start : start + BATCH]) for start in range(0, len(queries), BATCH)]
        return [found for batch in batches for found in self._persistently(SearchRequest(queries=batch, k=k))]

    def health(self) -> Health:
        """What the server says about its index; one attempt."""
        return _parse(Health, self._fetch("GET", "/health"), self._params.url)

    def _persistently(self, request: SearchRequest) -> list[list[Passage]]:
        attempts = 1 if self._down else 1 + self._params.retries
        for attempt in range(attempts):
            try:
                results = self._attempt(request)
            except SearchUnavailable as fault:
                logger.warning("search attempt %d of %d: %s", attempt + 1, attempts, fault)
                if attempt + 1 == attempts:
                    self._down = True
                    raise
                time.sleep(self._params.backoff_s * 2**attempt)
            else:
                self._down = False
                return results
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, request: SearchRequest) -> list[list[Passage]]:
        url = self._params.url
        reply = _parse(SearchReply, self._fetch("POST", "/search", request.model_dump_json()), url)
        if self._index_hash and reply.index_hash != self._index_hash:
            raise ValueError(
                f"the search server at {url} serves index {reply.index_hash[:12]} now, not {self._index_hash[:12]}; "
                "serve the same index, or run `dvc repro index`"
            )
        if len(reply.results) != len(request.queries) or any(len(each) > request.k for each in reply.results):
            raise SearchUnavailable(
                f"the search server at {url} answered {len(request.queries)} queries for {request.k} passages each "
                f"with {[len(each) for each in reply.results]}"
            )
        return reply.results

    def _fetch(self, method: str, path: str, content: str | None = None) -> bytes:
        """The body of an answer that came whole within the timeout."""
        url = self._params.url
        try:
            response = asyncio.run(self._answer(method, path, content))
        except TimeoutError as fault:
            raise SearchTimeout(f"the search server at {url} took longer than {self._params.timeout_s} s") from fault
        except httpx.HTTPError as fault:
            raise SearchUnavailable(f"the search server at {url} does not answer: {fault}") from fault
        if response.status_code >= 500 or response.status_code in BUSY:
            raise SearchUnavailable(f"the search server at {url} answered with status {response.status_code}")
        if response.status_code != 200:
            excerpt = response.content[:200].decode(errors="replace")
            raise ValueError(
                f"{url} refused the search with status {response.status_code}: {excerpt}; check remote.url"
            )
        return response.content

    async def _answer(self, method: str, path: str, content: str | None) -> httpx.Response:
        """Asynchronous, because only so a limit holds for an attempt as a whole, however slowly its bytes drip."""
        headers = {"content-type": "application/json"}
        async with (
            asyncio.timeout(self._params.timeout_s),
            httpx.AsyncClient(base_url=self._params.url, verify=self._tls, timeout=None) as client,
        ):
            return await client.request(method, path, content=content, headers=headers)


def _parse(kind: type[Reply], body: bytes, url: str) -> Reply:
    try:
        return kind.model_validate_json(body)
    except ValidationError as fault:
        problem = fault.errors(include_url=False, include_input=False)[0]["msg"]
        raise SearchUnavailable(f"{url} answered with something else than search results: {problem}") from None
