"""The HTTP client: reads answers within limits of time, size and shape, tries again, and says whose fault it is."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import re
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from agent_r1.faults import WorldFault, WorldTimeout
from agent_r1.harmless import harmless, without_password

MAX_ANSWER_BYTES = 1 << 25
# Statuses after which a request is tried again:
BUSY = frozenset({408, 429, 502, 503, 504})  # the server, or a proxy before it, asks to come again
FAILED = BUSY.union(range(500, 1000))  # any fault of the server
_CONNECT_TIMEOUT_S = 10.0
EXCERPT = 500  # characters of a server's own words in a message

Shape = TypeVar("Shape", bound=BaseModel)
T = TypeVar("T")
logger = logging.getLogger(__name__)


class BadAnswerError(ValueError):
    """An answer that is too large or of another shape; the message names the fault."""


_PASSING = (TimeoutError, ConnectionError, BadAnswerError)  # faults after which an attempt is repeated


class RefusalError(Exception):
    """An answer that is an error and would be the same error again."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}: {answer.reason}")
        self.answer = answer


class Fault(BaseModel):
    message: str


class _Error(BaseModel):
    """An error in OpenAI's form."""

    error: Fault


class Answer(NamedTuple):
    """A status and its body."""

    status: int
    body: bytes

    @property
    def reason(self) -> str:
        """The message of an error in OpenAI's form, or else the first words of the body."""
        try:
            return harmless(self.parse(_Error).error.message[:EXCERPT])
        except BadAnswerError:
            return harmless(self.body[:EXCERPT].decode(errors="replace"))

    def parse(self, kind: type[Shape]) -> Shape:
        """The body in the shape of a model; see `parsed`."""
        return parsed(self.body, kind)

    def require_ok(self, again: Container[int] = FAILED) -> Answer:
        """This answer if its status is 200; ConnectionError for a status to try `again`, RefusalError for others."""
        if self.status in again:
            raise ConnectionError(", ".join(filter(None, (f"status {self.status}", self.reason))))
        if self.status != 200:
            raise RefusalError(self)
        return self


class Client:
    """Asks one server; every request has a connection of its own. Safe in several threads at once."""

    def __init__(self, url: str, timeout_s: float, key: str, socket: str | None = None) -> None:
        """Requests carry the key as a bearer token, unless it is ""; `socket` is the path of a Unix socket."""
        if "?" in url:  # no path can be after it
            raise ValueError(f"{without_password(url)} is no address of a server: it ends before the question mark")
        self._url = url
        self._timeout_s = timeout_s
        self._socket = socket
        # Compressed, a small answer could become a large one while it is read.
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def ask(self, method: str, path: str, content: str | None = None) -> Answer:
        """The answer to a request, asked once.

        Raises TimeoutError if it was not whole within the limit, ConnectionError if there was none, and BadAnswerError
        if it is larger than MAX_ANSWER_BYTES or compressed.
        """
        return asyncio.run(self.answer(method, path, content))

    async def answer(
        self, method: str, path: str, content: str | None = None, most_bytes: int = MAX_ANSWER_BYTES
    ) -> Answer:
        """Asks, as `ask` does. The limit of time holds for all of an attempt, however slowly headers and body drip."""
        with self._named():
            async with asyncio.timeout(self._timeout_s), aclosing(self._pieces(method, path, content)) as pieces:
                body = bytearray()
                async for part in pieces:
                    body += part.body
                    require_small(len(body), most_bytes)
                return Answer(part.status, bytes(body))

    def lines(self, path: str, content: str) -> Iterator[bytes]:
        """The lines of the answer to a POST as they come; raises the errors of `ask` and of `require_ok`."""
        ends = time.monotonic() + self._timeout_s
        pieces = self._pieces("POST", path, content)

        async def coming() -> Answer | None:
            async with asyncio.timeout(ends - time.monotonic()):
                return await anext(pieces, None)

        read = 0
        rest = bytearray()
        with self._named(), asyncio.Runner() as runner:
            while part := runner.run(coming()):
                status = part.status
                read += len(part.body)
                rest += part.body
                require_small(read)
                if status == 200 and b"\n" in part.body:
                    *lines, rest = rest.split(b"\n")
                    yield from map(bytes, lines)
            yield Answer(status, bytes(rest)).require_ok().body

    async def _pieces(self, method: str, path: str, content: str | None) -> AsyncGenerator[Answer]:
        """An answer as it comes: its status, once its headers are there, and again with each piece of its body."""
        timeout = httpx.Timeout(None, connect=min(self._timeout_s, _CONNECT_TIMEOUT_S))
        transport = httpx.AsyncHTTPTransport(verify=tls(), uds=self._socket) if self._socket else None
        async with (
            httpx.AsyncClient(base_url=self._url, verify=tls(), transport=transport, timeout=timeout) as client,
            client.stream(method, path, content=content, headers=self._headers) as response,
        ):
            require_plain(response.headers)
            yield Answer(response.status_code, b"")
            async for piece in response.aiter_raw():
                yield Answer(response.status_code, piece)

    def require_health(self) -> None:
        """Raises OSError if /health is answered with another status than 200, and the errors of `ask`."""
        status = self.ask("GET", "/health").status
        if status != 200:
            raise OSError(f"status {status}")

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turns httpx's errors into Python's own."""
        try:
            yield
        except (TimeoutError, httpx.TimeoutException):
            raise TimeoutError(f"took longer than {self._timeout_s} s") from None
        except httpx.HTTPError as fault:
            cause: BaseException = fault
            while deeper := cause.__cause__ or cause.__context__:  # httpx says that all attempts failed, and not why
                cause = deeper
            raise ConnectionError(in_words(cause)) from fault
        except httpx.InvalidURL as fault:
            raise ValueError(f"{self._url} is no address of a server: {fault}") from None


class Retries:
    """Tries again after faults that may pass: no answer, none in time, or one that is nonsense.

    The waits between attempts double. After the last attempt fails the server counts as down: until it answers, every
    call makes a single attempt, so that an episode of many requests does not wait for each.
    """

    def __init__(self, who: str, retries: int, *, wait_s: float = 1.0, longest_wait_s: float = math.inf) -> None:
        """`who` names the server in log lines; `wait_s` is the first wait."""
        self._who = who
        self._retries = retries
        self._down = False
        self._wait_s = wait_s
        self._longest_wait_s = longest_wait_s

    @property
    def attempts(self) -> int:
        """The number of attempts that the next call makes at most."""
        return 1 if self._down else 1 + self._retries

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of an attempt. Raises the last TimeoutError, ConnectionError or BadAnswerError."""
        number = 1
        attempts = self.attempts
        while True:
            try:
                result = await attempt()
            except _PASSING as fault:
                if number == attempts:
                    self._down = True
                    raise
                logger.warning("%s: attempt %d of %d: %s", self._who, number, attempts, fault)
                await asyncio.sleep(min(self._wait_s * 2.0 ** (number - 1), self._longest_wait_s))
                number += 1
            else:
                self._down = False
                return result


@contextmanager
def named_faults(who: str, form: str, remedy: Callable[[int], str]) -> Iterator[None]:
    """Names a server in the faults of its requests, and says whose they are.

    Raises WorldFault if there was no answer, or none in its `form`, and ValueError for a refusal, with the remedy for
    its status, if any.
    """
    try:
        yield
    except (TimeoutError, ConnectionError) as fault:
        kind = WorldTimeout if isinstance(fault, TimeoutError) else WorldFault
        raise kind(f"{who} does not answer: {fault}") from None
    except BadAnswerError as fault:
        raise WorldFault(f"{who} answers in another form than {form}: {fault}") from None
    except RefusalError as fault:
        raise ValueError(f"{who} refused with {fault}{remedy(fault.answer.status)}") from None


def read_key(variable: str, of: str = "") -> str:
    """The key in an environment variable, whose name ends with the capitals of a server's; "" if there is none.

    Raises ValueError if no header can carry it.
    """
    variable += of.upper().replace("-", "_")
    key = os.environ.get(variable, "")
    if not re.fullmatch("[!-~]*", key):
        raise ValueError(f"{variable} holds a blank, or a letter beyond ASCII; make one with `openssl rand -hex 32`")
    return key


@functools.cache
def tls() -> ssl.SSLContext:
    """The settings of all TLS connections; making them takes longer than a search."""
    return httpx.create_ssl_context()


def in_words(fault: BaseException) -> str:
    """The first cause of a fault, in a line without passwords."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return harmless(without_password(f"{type(fault).__name__}: {fault}"[:EXCERPT])).rstrip(": ")


def parsed(body: bytes, kind: type[Shape]) -> Shape:
    """JSON in the shape of a model; raises BadAnswerError, which names the first wrong field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as fault:
        problem = fault.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise BadAnswerError(f"{where}: {problem['msg']}" if where else problem["msg"]) from None


def require_plain(headers: Mapping[str, str]) -> None:
    """Raises BadAnswerError if an answer with these headers is compressed."""
    coding = headers.get("content-encoding", "identity")
    if coding != "identity":
        raise BadAnswerError(f"it is compressed ({coding[:20]}), which was not asked for")


def require_small(size: int, most: int = MAX_ANSWER_BYTES) -> None:
    """Raises BadAnswerError if an answer of `size` bytes is larger than `most`."""
    if size > most:
        raise BadAnswerError(f"it is larger than {most >> 20} MiB")
