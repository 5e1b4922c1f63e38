"""An index that another process serves, and what the two say to each other; see `agent_r1.search.server`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, FailFast, Field

from agent_r1.http.client import BadAnswerError, Client, Shape, read_key
from agent_r1.params.stages import RemoteParams
from agent_r1.records import Passage
from agent_r1.search.base import Search, SearchTimeout, SearchUnavailable

MAX_QUERY = 8192  # characters


class SearchRequest(BaseModel):
    """POST /search"""

    queries: Annotated[list[Annotated[str, Field(max_length=MAX_QUERY)]], Field(max_length=1024), FailFast()]
    k: Annotated[int, Field(ge=1, le=1000)]


class SearchReply(BaseModel):
    """The answer to it."""

    index_hash: str
    results: Annotated[list[Annotated[list[Passage], FailFast()]], FailFast()]  # for each query, best first


class Health(BaseModel):
    """GET /health"""

    kind: str
    index_hash: str
    passages_hash: str  # of the Parquet file that the index was built from
    size: int  # passages


SEARCH_KEY = "AGENT_R1_SEARCH_KEY"  # for whatever stands before the server and asks for one
BATCH = 32  # queries of a request: every one has its own time limit, however many are asked at once
BUSY = {408, 429}  # besides 5xx: the server, or what stands before it, asks to come again

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
        self._client = Client(params.url, params.timeout_s, read_key(SEARCH_KEY))
        self._down = False

    @property
    def waits(self) -> bool:
        return True

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For each query, of which MAX_QUERY characters are looked at, its best passages.

        Raises SearchTimeout if the server took too long, every time, SearchUnavailable if it does not answer, or with
        nonsense, every time, and ValueError if it refuses the request, or serves another index.
        """
        cut = [query[:MAX_QUERY] for query in queries]
        batches = [cut[start : start + BATCH] for start in range(0, len(queries), BATCH)]
        return [found for batch in batches for found in self._persistently(SearchRequest(queries=batch, k=k))]

    def health(self) -> Health:
        """What the server says about its index; one attempt."""
        return self._fetch(Health, "GET", "/health")

    def _persistently(self, request: SearchRequest) -> list[list[Passage]]:
        attempts = 1 if self._down else 1 + self._params.retries
        for attempt in range(attempts):
            try:
                results = self._attempt(request)
            except SearchUnavailable as fault:
                level = logging.DEBUG if self._down else logging.WARNING  # that it is down was said
                logger.log(level, "search attempt %d of %d: %s", attempt + 1, attempts, fault)
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
        reply = self._fetch(SearchReply, "POST", "/search", request.model_dump_json())
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

    def _fetch(self, kind: type[Shape], method: str, path: str, content: str | None = None) -> Shape:
        """An answer that came whole within the timeout, and is of its kind."""
        server = f"the search server at {self._params.url}"
        try:
            answer = self._client.ask(method, path, content)
            if answer.status >= 500 or answer.status in BUSY:
                raise SearchUnavailable(f"{server} answered with status {answer.status}")
            if answer.status != 200:
                raise ValueError(
                    f"{server} refused the search with status {answer.status}: {answer.excerpt}; check remote.url"
                )
            return answer.parse(kind)
        except TimeoutError as fault:
            raise SearchTimeout(f"{server} {fault}") from fault
        except ConnectionError as fault:
            raise SearchUnavailable(f"{server} does not answer: {fault}") from fault
        except BadAnswerError as fault:
            raise SearchUnavailable(f"{server} answered with something else than search results: {fault}") from None
