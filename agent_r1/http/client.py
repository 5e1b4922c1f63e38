"""What other servers answer by HTTP: whole, within one limit of time and one of size, and of a known shape."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from agent_r1.harmless import harmless

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of this machine that lead nowhere else
MAX_ANSWER_BYTES = 1 << 25
_CONNECT_TIMEOUT_S = 10.0
_EXCERPT = 500  # characters of a server's own words in a message

Shape = TypeVar("Shape", bound=BaseModel)


def read_key(variable: str) -> str:
    """The key in an environment variable, "" where there is none; raises ValueError if no header can carry it."""
    key = os.environ.get(variable, "")
    if not re.fullmatch("[!-~]*", key):
        raise ValueError(f"{variable} holds a blank, or a letter beyond ASCII; make one with `openssl rand -hex 32`")
    return key


class BadAnswerError(ValueError):
    """An answer that is larger than any honest one, or of another shape; the message says in what."""


class Answer(NamedTuple):
    """A status and what came with it, whole."""

    status: int
    body: bytes

    @property
    def excerpt(self) -> str:
        """Its first words."""
        return harmless(self.body[:_EXCERPT].decode(errors="replace"))

    def parse(self, kind: type[Shape]) -> Shape:
        """The body, of the shape of a model; raises BadAnswerError, which names the first field that is not."""
        return parsed(self.body, kind)


class RefusalError(Exception):
    """What a server said in place of the lines that it was asked for."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.excerpt)
        self.answer = answer


def parsed(body: bytes, kind: type[Shape]) -> Shape:
    """JSON of the shape of a model; raises BadAnswerError, which names the first field that is not."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as fault:
        problem = fault.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise BadAnswerError(f"{where}: {problem['msg']}" if where else problem["msg"]) from None


class Client:
    """Asks one server; every request has a connection of its own. Safe in several threads at once."""

    def __init__(self, url: str, timeout_s: float, key: str) -> None:
        """A client of the server at an address, which is sent the key, if that is not ""."""
        self._url, self._timeout_s = url, timeout_s
        # Compressed, a small answer could become a large one while it is read.
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._tls = httpx.create_ssl_context()  # takes longer than a search

    def ask(self, method: str, path: str, content: str | None = None) -> Answer:
        """The answer to a request.

        Raises TimeoutError if it was not whole within the limit, ConnectionError if there was none, and BadAnswerError
        if it is larger than MAX_ANSWER_BYTES, or compressed, which nobody asked for.
        """
        with self._named():
            return asyncio.run(self._answer(method, path, content))

    def lines(self, path: str, content: str) -> Iterator[bytes]:
        """The lines of the answer to a POST, as they come; errors are those of `ask`.

        An answer of another status than 200 is raised as a whole, as a RefusalError.
        """
        ends = time.monotonic() + self._timeout_s
        timeout = httpx.Timeout(self._timeout_s, connect=min(self._timeout_s, _CONNECT_TIMEOUT_S))
        with (
            self._named(),
            httpx.Client(base_url=self._url, verify=self._tls, timeout=timeout) as client,
            client.stream("POST", path, content=content, headers=self._headers) as response,
        ):
            require_plain(response.headers)
            read, rest, ok = 0, bytearray(), response.status_code == 200
            for piece in response.iter_raw():
                read += len(piece)
                rest += piece
                require_small(read)
                if time.monotonic() > ends:
                    raise TimeoutError
                if ok and b"\n" in piece:
                    *whole, rest = rest.split(b"\n")
                    yield from map(bytes, whole)
            if not ok:
                raise RefusalError(Answer(response.status_code, bytes(rest)))
            yield bytes(rest)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What can go wrong on the way to a server, in this module's words."""
        try:
            yield
        except (TimeoutError, httpx.TimeoutException):
            raise TimeoutError(f"took longer than {self._timeout_s} s") from None
        except httpx.HTTPError as fault:
            raise ConnectionError(harmless(f"{type(fault).__name__}: {fault}"[:_EXCERPT].rstrip(": "))) from fault
        except httpx.InvalidURL as fault:
            raise ValueError(f"{self._url} is no address of a server: {fault}") from None

    def require_health(self) -> None:
        """Raises OSError if /health is answered with another status than 200, and what `ask` raises if it is not."""
        if (status := self.ask("GET", "/health").status) != 200:
            raise OSError(f"status {status}")

    async def _answer(self, method: str, path: str, content: str | None) -> Answer:
        """Asynchronous, because only so a limit holds for an attempt as a whole, however slowly its bytes drip."""
        timeout = httpx.Timeout(None, connect=min(self._timeout_s, _CONNECT_TIMEOUT_S))
        async with (
            asyncio.timeout(self._timeout_s),
            httpx.AsyncClient(base_url=self._url, verify=self._tls, timeout=timeout) as client,
            client.stream(method, path, content=content, headers=self._headers) as response,
        ):
            require_plain(response.headers)
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                require_small(len(body))
            return Answer(response.status_code, bytes(body))


def require_plain(headers: Mapping[str, str]) -> None:
    """Raises BadAnswerError if an answer with these headers is compressed."""
    if (coding := headers.get("content-encoding", "identity")) != "identity":
        raise BadAnswerError(f"it is compressed ({coding[:20]}), which was not asked for")


def require_small(size: int) -> None:
    """Raises BadAnswerError if an answer of so many bytes is larger than MAX_ANSWER_BYTES."""
    if size > MAX_ANSWER_BYTES:
        raise BadAnswerError(f"it is larger than {MAX_ANSWER_BYTES >> 20} MiB")
