"""What agents send to the gateway, in each dialect."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from agent_r1.agents.session import offered
from agent_r1.http.dialects import DIALECTS
from agent_r1.http.dialects.conversation import Dialect, Refused, Reply, ToolCall
from benchmarks.hostile.kind import Kind, require
from benchmarks.hostile.mutations import as_bytes, as_json, mutated

_SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}
_TOOL = {"name": "search", "parameters": _SCHEMA}
_FORM = {"type": "json_schema", "name": "form", "schema": _SCHEMA}
_CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
_CHAT = {
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "Quill"},
    ],
    "tools": [{"type": "function", "function": _TOOL}],
    "tool_choice": {"type": "function", "function": {"name": "search"}},
    "response_format": {"type": "json_schema", "json_schema": _FORM},
    "stream_options": {"include_usage": True},
    "stop": ["x"],
}
_RESPONSES = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Quill"}]},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Quill"},
        {"type": "item_reference", "id": "msg_1"},
    ],
    "tools": [{"type": "function", **_TOOL}],
    "text": {"format": _FORM},
    "previous_response_id": "resp_1",
}
_THOUGHT = {"type": "thinking", "thinking": "Hm."}
_USE = {"type": "tool_use", "id": "c1", "name": "search", "input": {}}
_MESSAGES = {
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Who?"},
        {
            "role": "assistant",
            "content": [_THOUGHT, {"type": "text", "text": "I."}, _USE],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Quill"}]},
    ],
    "tools": [{"name": "search", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "output_config": {"format": _FORM},
    "stop_sequences": ["x"],
}
HONEST: tuple[dict[str, Any], ...] = tuple(  # a body of each dialect
    {"model": "policy", "stream": True, "temperature": 0.5, **body} for body in (_CHAT, _RESPONSES, _MESSAGES)
)
STORED: dict[str, list[dict[str, Any]]] = {
    "resp_1": [{"role": "user", "content": "Who?"}],
    "msg_1": [{"role": "assistant", "content": "I."}],
}
_REPLY = Reply("1", "policy", ["Hm."], "I.", [ToolCall("c1", "search", {})], cut=False, stop=None, read=9, sampled=3)


class Sent(NamedTuple):
    """A body, and the dialect that reads it."""

    dialect: Dialect
    body: bytes


class Dialects(Kind):
    """A request is read and answered, or refused in the form of its dialect."""

    name, tried, refusals = "dialects", 1000, (Refused,)

    def make(self, rng: Random) -> Sent:
        number = rng.randrange(len(DIALECTS))
        return Sent(
            DIALECTS[number], as_bytes(as_json(mutated(HONEST[number], rng, rng.choice((0, 1, 1, 2))), rng), rng)
        )

    def judge(self, made: Sent) -> None:
        request = made.dialect.read(made.body, STORED)
        offered(request.spelled_schemas)
        for message in request.messages:
            require(message.role in ("system", "user", "assistant", "tool"), f"a message of {message.role}")
            message.text.encode()
        made.dialect.write(request, _REPLY)
        made.dialect.events(request, _REPLY)
        made.dialect.stored(request, _REPLY)
