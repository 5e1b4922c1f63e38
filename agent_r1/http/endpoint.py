"""Models and agents behind OpenAI's chat completions, asked over HTTP and trusted with text alone."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

from agent_r1.faults import ContextFull, WorldFault
from agent_r1.http.client import BadAnswerError, Client, RefusalError, Retries, Shape, named_faults, parsed, read_key
from agent_r1.params.sections import address
from agent_r1.records import Json

ENDPOINT_KEY = "AGENT_R1_ENDPOINT_KEY"  # the key of an endpoint, which its clients send
MAX_TEXT = 1 << 20  # characters of one message
_LONGEST_WAIT_S = 30.0  # between two attempts
_NO_ROOM = re.compile(rb"context[ _](length|size|limit|window)|(prompt|input) is too long", re.IGNORECASE)

logger = logging.getLogger(__name__)


class _Part(BaseModel):
    text: str = ""  # none in a thought or a picture


class _Called(BaseModel):
    function: Json  # `name` and `arguments`, an object or a text of JSON


class _Said(BaseModel):
    content: Annotated[str, Field(max_length=MAX_TEXT)] | list[_Part] | None = None
    tool_calls: list[_Called] | None = None

    @property
    def text(self) -> str:
        """All parts, then the calls that the server took out, in an action's tags."""
        content = self.content or ""
        parts = [content] if isinstance(content, str) else [part.text for part in content]
        calls = ({name: call.function.get(name) for name in ("name", "arguments")} for call in self.tool_calls or ())
        return "".join([*parts, *(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)])[:MAX_TEXT]


class _Completed(BaseModel):
    message: _Said
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: Annotated[list[_Completed], Field(min_length=1, max_length=1)]


class Scored(BaseModel):
    """A token of a prompt, as vLLM tells it."""

    logprob: Annotated[float, Field(le=1e-3, allow_inf_nan=False)]  # nats; rounding lifts a sure token's above 0
    decoded_token: str


class _Last(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]


class _Prompted(BaseModel):
    prompt_logprobs: list[dict[int, Scored] | None]
    logprobs: _Last


class _Scores(BaseModel):
    choices: Annotated[list[_Prompted], Field(min_length=1, max_length=1)]


class Reply(NamedTuple):
    """The text of a model."""

    text: str
    cut: bool  # at the limit of tokens


class Endpoint:
    """One address, such as https://api.example.org/v1. Its methods may run in several threads at once.

    Raises ValueError for a wrong address, key, model or request, ContextFull if a conversation leaves the model no
    room, and WorldFault if no answer comes, or none that such an endpoint gives, after all retries.
    """

    def __init__(self, url: str, *, timeout_s: float, retries: int = 0) -> None:
        self.url = address(url)
        self._who = f"the endpoint {self.url}"
        self._client = Client(self.url, timeout_s, read_key(ENDPOINT_KEY))
        self._retries = Retries(self._who, retries, longest_wait_s=_LONGEST_WAIT_S)
        self.untold = set[str]()  # options that were refused, and are left out from then on

    def describe(self, kind: type[Shape]) -> Shape:
        """The answer to /models, in the shape of a model."""
        with self._named():
            return self._ask(kind, "GET", "/models")

    def complete(self, model: str, messages: Sequence[tuple[str, str]], options: Mapping[str, float]) -> Reply:
        """A model's answer to roles and texts; an option (`temperature`, `max_tokens`) that it refuses is left out."""
        conversation = [{"role": role, "content": text} for role, text in messages]
        request = {
            "model": model,
            "messages": conversation,
            **{name: options[name] for name in options.keys() - self.untold},
        }
        with self._named():
            while True:
                try:
                    [choice] = self._ask(_Completion, "POST", "/chat/completions", json.dumps(request)).choices
                    return Reply(text=choice.message.text, cut=choice.finish_reason == "length")
                except RefusalError as refusal:
                    del request[self._refused(refusal, request)]

    def score(self, model: str, ids: Sequence[int]) -> list[Scored]:
        """The tokens of a context but its first, which nothing predicts, as vLLM scores them.

        The last is the only one that may be sampled after the others: vLLM always samples, and a context may fill its
        window.
        """
        *prompt, last = ids
        request = {"model": model, "prompt": prompt, "prompt_logprobs": 0, "temperature": 0, "max_tokens": 1}
        sampled = {"logprobs": 0, "allowed_token_ids": [last]}
        with self._named("vLLM's"):
            [choice] = self._ask(_Scores, "POST", "/completions", json.dumps(request | sampled)).choices
            try:
                scored = [(at or {})[token] for token, at in zip(prompt[1:], choice.prompt_logprobs[1:], strict=True)]
                [logprob] = choice.logprobs.token_logprobs
                [text] = choice.logprobs.tokens
                return [*scored, Scored(logprob=logprob, decoded_token=text)]
            except (KeyError, ValueError) as fault:
                raise BadAnswerError(f"no score of every token ({fault})") from None

    def _refused(self, refusal: RefusalError, options: Collection[str]) -> str:
        """The option without which to ask again. Raises the refusal if there is none."""
        if _NO_ROOM.search(refusal.answer.body):
            if "max_tokens" in options:
                return "max_tokens"  # there may be room for fewer
            raise ContextFull(f"{self._who} refused with {refusal}") from None
        words = refusal.answer.reason
        name = next((name for name in ("temperature", "max_tokens") if name in options and name in words), None)
        if name is None:
            raise refusal
        if name not in self.untold:
            self.untold.add(name)
            logger.warning("%s is not told %s from now on: %s", self._who, name, words)
        return name

    def stream(self, kind: type[Shape], body: Json) -> Iterator[Shape]:
        """The events of a completion as they come, in the shape of a model; one attempt."""
        content = json.dumps(body | {"stream": True})
        with self._named():
            for line in self._client.lines("/chat/completions", content):
                event = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if event == b"[DONE]":
                    return
                if event:
                    yield parsed(event, kind)
        raise WorldFault(f"{self._who} ended in the middle of an answer")

    def _ask(self, kind: type[Shape], method: str, path: str, body: str | None = None) -> Shape:
        async def attempt() -> Shape:
            return (await self._client.answer(method, path, body)).require_ok().parse(kind)

        return asyncio.run(self._retries.run(attempt))

    def _named(self, form: str = "OpenAI's") -> AbstractContextManager[None]:
        remedy = f"; set {ENDPOINT_KEY} to its key"
        return named_faults(self._who, form, lambda status: remedy if status in (401, 403) else "")
