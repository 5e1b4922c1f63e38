"""Models and agents behind OpenAI's chat completions, asked over HTTP and trusted with text alone."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, Field

from agent_r1.faults import WorldFault
from agent_r1.harmless import harmless
from agent_r1.http.client import Answer, BadAnswerError, Client, RefusalError, Shape, parsed, read_key
from agent_r1.params.sections import address

ENDPOINT_KEY = "AGENT_R1_ENDPOINT_KEY"  # what an endpoint asks for, and its clients send
MAX_TEXT = 1 << 20  # characters of one message
_BUSY = {408, 429}  # besides 5xx: it asks to come again
_LONGEST_WAIT_S = 30.0  # between two attempts

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Said(BaseModel):
    content: Annotated[str, Field(max_length=MAX_TEXT)] | None = None


class _Choice(BaseModel):
    message: _Said
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    """The answer to /models."""

    data: Annotated[list[_Model], Field(max_length=10_000)]


class _Fault(BaseModel):
    message: str


class _Error(BaseModel):
    """What stands in place of an answer."""

    error: _Fault


class Reply(NamedTuple):
    """What a model wrote."""

    text: str
    cut: bool  # at the limit of tokens


class Endpoint:
    """One address, such as https://api.example.org/v1. Its methods may run in several threads at once.

    Raises ValueError for what is asked wrongly (address, key, model, request), and WorldFault where no answer comes, or
    none that such an endpoint gives, however often it is tried. While it is down, a request is tried once.
    """

    def __init__(self, url: str, *, timeout_s: float, retries: int = 0) -> None:
        self.url = address(url)
        self._client, self._retries, self._down = Client(self.url, timeout_s, read_key(ENDPOINT_KEY)), retries, False

    def models(self) -> list[str]:
        """The names of what can be asked."""
        return [model.id for model in self.describe(_Models).data]

    def describe(self, kind: type[Shape]) -> Shape:
        """The answer to /models, of the shape of a model."""
        return self._persistently(lambda: self._answered(self._client.ask("GET", "/models")).parse(kind))

    def complete(self, model: str, messages: Sequence[tuple[str, str]], *, max_tokens: int) -> Reply:
        """What a model says to a conversation of roles and texts, at temperature 0."""
        said = [{"role": role, "content": text} for role, text in messages]
        body = json.dumps({"model": model, "messages": said, "temperature": 0, "max_tokens": max_tokens})

        def attempt() -> _Completion:
            return self._answered(self._client.ask("POST", "/chat/completions", body)).parse(_Completion)

        [choice] = self._persistently(attempt).choices
        return Reply(text=choice.message.content or "", cut=choice.finish_reason == "length")

    def stream(self, body: dict[str, Any]) -> Iterator[bytes]:
        """The events of a completion as they come, in JSON; one attempt."""
        content = json.dumps(body | {"stream": True})
        with _words(self.url):
            try:
                for line in self._client.lines("/chat/completions", content):
                    event = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if event == b"[DONE]":
                        return
                    if event:
                        yield event
            except RefusalError as refused:
                self._answered(refused.answer)
        raise WorldFault(f"the endpoint {self.url} ended in the middle of an answer")

    def read(self, event: bytes, kind: type[Shape]) -> Shape:
        """An event of the shape of a model."""
        with _words(self.url):
            return parsed(event, kind)

    def _persistently(self, attempt: Callable[[], T]) -> T:
        attempts = 1 if self._down else 1 + self._retries
        for number in range(1, attempts + 1):
            try:
                with _words(self.url):
                    found = attempt()
            except WorldFault as fault:
                if number == attempts:
                    self._down = True
                    raise
                logger.warning("attempt %d of %d: %s", number, attempts, fault)
                time.sleep(min(2.0 ** (number - 1), _LONGEST_WAIT_S))
            else:
                self._down = False
                return found
        raise RuntimeError("the last attempt returns or raises")

    def _answered(self, answer: Answer) -> Answer:
        """The answer where it is none of an error."""
        if answer.status == 200:
            return answer
        if answer.status >= 500 or answer.status in _BUSY:
            raise ConnectionError(f"status {answer.status}, {_reason(answer)}")
        remedy = f"; set {ENDPOINT_KEY} to its key" if answer.status in (401, 403) else ""
        raise ValueError(f"the endpoint {self.url} refuses, with status {answer.status}: {_reason(answer)}{remedy}")


def _reason(answer: Answer) -> str:
    """What an error says in OpenAI's form, or else its first words."""
    try:
        return harmless(answer.parse(_Error).error.message)[: len(answer.excerpt)]
    except BadAnswerError:
        return answer.excerpt


@contextmanager
def _words(url: str) -> Iterator[None]:
    """Has what goes wrong with an endpoint say that it is the world's fault, and whose."""
    try:
        yield
    except (TimeoutError, ConnectionError) as fault:
        raise WorldFault(f"the endpoint {url} does not answer: {fault}") from None
    except BadAnswerError as fault:
        raise WorldFault(f"the endpoint {url} answers with something else than OpenAI's form: {fault}") from None
