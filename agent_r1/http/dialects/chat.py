"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from agent_r1.http.dialects.conversation import (
    MOST_MESSAGES,
    Body,
    ChatMessage,
    ChatRequest,
    Content,
    Dialect,
    Items,
    Reply,
    ToolCall,
    choice_of,
    event,
    form_of,
    texts_of,
)
from agent_r1.records import Json

DONE = "data: [DONE]\n\n"  # the last event of a stream


class _Function(BaseModel):
    name: str
    arguments: str | Json


class _Call(BaseModel):
    id: str
    function: _Function


class _Message(BaseModel):
    """Other keys, such as a name, are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as others call it
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None

    def as_read(self, where: str) -> ChatMessage:
        text, thought = texts_of(self.content, where)
        calls = [ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()]
        if self.function_call:
            calls.append(ToolCall("", self.function_call.name, self.function_call.arguments))
        return ChatMessage(
            role={"developer": "system", "function": "tool"}.get(self.role, self.role),
            text=text or self.refusal or "",
            thought=self.reasoning_content or self.reasoning or thought,
            calls=tuple(calls),
            call_id=self.tool_call_id or "",
        )


class _Body(Body):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    stream_options: Json | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[str], Field(max_length=4)] | str | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None


class ChatCompletions(Dialect):
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"

    def read(self, body: bytes, _: Items) -> ChatRequest:
        request = _Body.read(body)
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        return ChatRequest(
            model=request.model,
            messages=[message.as_read(f"messages.{at}.content") for at, message in enumerate(request.messages)],
            tools=request.tools or (),
            choice=choice_of(request.tool_choice),
            form=form_of(request.response_format, "response_format"),
            parallel=request.parallel_tool_calls is not False,
            most=min(filter(None, (request.max_tokens, request.max_completion_tokens)), default=None),
            stops=[stop for stop in stops if stop],
            seed=request.seed,
            stream=bool(request.stream),
            with_usage=bool((request.stream_options or {}).get("include_usage")),
            unapplied=request.unapplied,
        )

    def write(self, _: ChatRequest, reply: Reply) -> Json:
        choice = {"index": 0, "message": _message(reply), "finish_reason": ending(reply), "logprobs": None}
        return head(reply, "chat.completion", [choice]) | {"usage": usage(reply)}

    def events(self, request: ChatRequest, reply: Reply) -> list[str]:
        message = _message(reply)
        for at, call in enumerate(message.get("tool_calls", ())):
            call["index"] = at
        deltas = [{"role": message.pop("role"), "content": ""}, message, {}]
        endings = [None, None, ending(reply)]
        steps = zip(deltas, endings, strict=True)
        choices = [[{"index": 0, "delta": delta, "finish_reason": end, "logprobs": None}] for delta, end in steps]
        chunks = [head(reply, "chat.completion.chunk", choice) for choice in choices]
        if request.with_usage:
            chunks.append(head(reply, "chat.completion.chunk", []) | {"usage": usage(reply)})
        return [*map(event, chunks), DONE]


def head(reply: Reply, kind: str, choices: Sequence[Json]) -> Json:
    name = f"chatcmpl-{reply.name}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": reply.model, "choices": choices}


def _message(reply: Reply) -> Json:
    message: Json = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.thought:
        message["reasoning_content"] = reply.thought
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.spelled}}
            for call in reply.calls
        ]
    return message


def ending(reply: Reply) -> str:
    return "tool_calls" if reply.calls else "length" if reply.cut else "stop"


def usage(reply: Reply) -> dict[str, int]:
    total = reply.read + reply.sampled
    return {"prompt_tokens": reply.read, "completion_tokens": reply.sampled, "total_tokens": total}
