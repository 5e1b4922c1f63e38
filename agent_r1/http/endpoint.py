"""Models and agents behind OpenAI's chat completions, asked over HTTP and trusted with text alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from agent_r1.faults import WorldFault
from agent_r1.http.client import Client, Retries, Shape, named_faults, parsed, read_key
from agent_r1.params.sections import address

ENDPOINT_KEY = "AGENT_R1_ENDPOINT_KEY"  # the key of an endpoint, which its clients send
MAX_TEXT = 1 << 20  # characters of one message
_LONGEST_WAIT_S = 30.0  # between two attempts


class _Said(BaseModel):
    content: Annotated[str, Field(max_length=MAX_TEXT)] | None = None


class _Completed(BaseModel):
    message: _Said
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: Annotated[list[_Completed], Field(min_length=1, max_length=1)]


class Reply(NamedTuple):
    """The text of a model."""

    text: str
    cut: bool  # at the limit of tokens


class Endpoint:
    """One address, such as https://api.example.org/v1. Its methods may run in several threads at once.

    Raises ValueError for a wrong address, key, model or request, and WorldFault if no answer comes, or none that such
    an endpoint gives, after all retries.
    """

    def __init__(self, url: str, *, timeout_s: float, retries: int = 0) -> None:
        self.url = address(url)
        self._who = f"the endpoint {self.url}"
        self._client = Client(self.url, timeout_s, read_key(ENDPOINT_KEY))
        self._retries = Retries(self._who, retries, longest_wait_s=_LONGEST_WAIT_S)

    def describe(self, kind: type[Shape]) -> Shape:
        """The answer to /models, in the shape of a model."""
        return self._fetch(kind, "GET", "/models")

    def complete(self, model: str, messages: Sequence[tuple[str, str]], *, max_tokens: int) -> Reply:
        """A model's answer to a conversation of roles and texts, at temperature 0."""
        said = [{"role": role, "content": text} for role, text in messages]
        body = json.dumps({"model": model, "messages": said, "temperature": 0, "max_tokens": max_tokens})
        [choice] = self._fetch(_Completion, "POST", "/chat/completions", body).choices
        return Reply(text=choice.message.content or "", cut=choice.finish_reason == "length")

    def stream(self, body: dict[str, Any]) -> Iterator[bytes]:
        """The events of a completion as they come, in JSON; one attempt."""
        content = json.dumps(body | {"stream": True})
        with self._named():
            for line in self._client.lines("/chat/completions", content):
                event = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if event == b"[DONE]":
                    return
                if event:
                    yield event
        raise WorldFault(f"{self._who} ended in the middle of an answer")

    def read(self, event: bytes, kind: type[Shape]) -> Shape:
        """An event in the shape of a model."""
        with self._named():
            return parsed(event, kind)

    def _fetch(self, kind: type[Shape], method: str, path: str, body: str | None = None) -> Shape:
        with self._named():
            return self._retries.run(lambda: self._client.ask(method, path, body).require_ok().parse(kind))

    def _named(self) -> AbstractContextManager[None]:
        remedy = f"; set {ENDPOINT_KEY} to its key"
        return named_faults(self._who, "OpenAI's", lambda status: remedy if status in (401, 403) else "")
