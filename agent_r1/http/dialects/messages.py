"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from agent_r1.http.dialects.conversation import (
    MOST_MESSAGES,
    Body,
    ChatMessage,
    ChatRequest,
    Content,
    Dialect,
    Items,
    Refused,
    Reply,
    ToolCall,
    choice_of,
    event,
    form_of,
    texts_of,
)
from agent_r1.records import Json

# The type of an error by its status; others are the request's below 500, the server's from there on.
_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: Content


class _Body(Body):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Content = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None
    output_config: Json | None = None


class Messages(Dialect):
    """POST /v1/messages."""

    path = "/v1/messages"
    opening = 2

    def read(self, body: bytes, _: Items) -> ChatRequest:
        request = _Body.read(body)
        system = texts_of(request.system, "system")[0]
        messages = [ChatMessage("system", system)] if system else []
        for at, message in enumerate(request.messages):
            messages += _messages(message, f"messages.{at}.content")
        choice = request.tool_choice
        return ChatRequest(
            model=request.model,
            messages=messages,
            tools=[_tool(tool, at) for at, tool in enumerate(request.tools or ())],
            choice=choice_of(choice),
            form=form_of((request.output_config or {}).get("format"), "output_config"),
            parallel=not (isinstance(choice, dict) and choice.get("disable_parallel_tool_use")),
            most=request.max_tokens,
            stops=[stop for stop in request.stop_sequences or () if stop],
            stream=bool(request.stream),
            unapplied=request.unapplied,
        )

    def write(self, _: ChatRequest, reply: Reply) -> Json:
        ending = "stop_sequence" if reply.stop else "end_turn"
        ending = "max_tokens" if reply.cut else ending
        return _head(reply, reply.sampled) | {
            "content": _blocks(reply),
            "stop_reason": "tool_use" if reply.calls else ending,
            "stop_sequence": reply.stop,
        }

    def events(self, request: ChatRequest, reply: Reply) -> list[str]:
        whole = self.write(request, reply)
        steps: list[Json] = [{"type": "message_start", "message": _head(reply, 0)}]
        for at, block in enumerate(whole["content"]):
            steps += [step | {"index": at} for step in _block_events(block, reply.thoughts)]
        ending = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        steps.append({"type": "message_delta", "delta": ending, "usage": whole["usage"]})
        return [*map(event, [*steps, {"type": "message_stop"}])]

    def error(self, fault: Refused) -> Json:
        kind = _ERRORS.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(fault)}, "request_id": None}


def _messages(message: _Message, where: str) -> Iterator[ChatMessage]:
    """A message as messages: the results of calls are each one of their own."""
    content = message.content
    if isinstance(content, str) or message.role == "assistant":
        yield _said(message.role, content, where)
        return
    for is_result, group in groupby(content or (), lambda part: part.get("type") == "tool_result"):
        parts = [*group]
        if not is_result:
            yield _said(message.role, parts, where)
            continue
        for part in parts:
            text = texts_of(part.get("content"), f"{where}.content")[0]
            yield ChatMessage("tool", text, call_id=str(part.get("tool_use_id")))


def _said(role: str, content: Content, where: str) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage(role, content)
    calls = list[ToolCall]()
    parts = list[Json]()
    for part in content or ():
        match part:
            case {"type": "tool_use", "id": str(name), "name": str(tool), "input": dict(arguments)}:
                calls.append(ToolCall(name, tool, arguments))
            case _:
                parts.append(part)
    text, thought = texts_of(parts, where)
    return ChatMessage(role, text, thought, tuple(calls))


def _tool(tool: Mapping[str, Any], at: int) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise Refused(f"tools.{at}: a tool has a schema of its own here, no {str(tool['type'])[:80]}", "tools")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _head(reply: Reply, sampled: int) -> Json:
    usage = {"input_tokens": reply.read, "output_tokens": sampled}
    return {
        "id": f"msg_{reply.name}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }


def _blocks(reply: Reply) -> list[Json]:
    blocks = list[Json]()
    if reply.thought:
        blocks.append({"type": "thinking", "thinking": reply.thought, "signature": reply.name})
    if reply.content or not reply.calls:
        blocks.append({"type": "text", "text": reply.content})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in reply.calls
    ]


def _block_events(block: Json, thoughts: Sequence[str]) -> Iterator[Json]:
    """A block: opened without its text, the text at once, or a thought by its pieces, closed."""
    keys = [key for key in ("thinking", "signature", "text") if key in block]
    empty: Json = dict.fromkeys(keys, "")
    pieces = {"thinking": thoughts}
    deltas = [{"type": f"{key}_delta", key: piece} for key in keys for piece in pieces.get(key, [block[key]])]
    if block["type"] == "tool_use":
        empty = {"input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}]
    yield {"type": "content_block_start", "content_block": block | empty}
    for delta in deltas:
        yield {"type": "content_block_delta", "delta": delta}
    yield {"type": "content_block_stop"}
