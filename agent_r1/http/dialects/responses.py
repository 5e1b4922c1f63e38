"""OpenAI's Responses. What an episode answered is stored, and named again by its ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any

from pydantic import Field

from agent_r1.http.dialects.conversation import (
    MOST_MESSAGES,
    Body,
    ChatMessage,
    ChatRequest,
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

Item = Mapping[str, Any]

# Fields of a request that a response repeats, with what stands there if it has none.
_REPEATED: Json = {
    "instructions": None, "metadata": {}, "parallel_tool_calls": True, "previous_response_id": None, "tools": [],
    "tool_choice": "auto",
}  # fmt: skip
# By the type of an item: the field of its text, or its only part; the events of the part, and of the part's text.
_TEXTS = {"reasoning": "summary", "message": "content", "function_call": "arguments"}
_PLACES = [*_TEXTS]  # in a message of the assistant
_PART_EVENTS = {
    "message": ("response.content_part", "response.output_text"),
    "reasoning": ("response.reasoning_summary_part", "response.reasoning_summary_text"),
}


class _Body(Body):
    parallel_tool_calls: bool | None = None
    input: Annotated[list[Json], Field(min_length=1, max_length=MOST_MESSAGES)] | str
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    text: Json | None = None


class Responses(Dialect):
    """POST /v1/responses."""

    path = "/v1/responses"
    opening = 4

    def read(self, body: bytes, stored: Items) -> ChatRequest:
        request = _Body.read(body)
        items = [*_items(request, stored)]
        if len(items) > MOST_MESSAGES:
            raise Refused(f"input: with what is stored it has {len(items)} items, more than {MOST_MESSAGES}", "input")
        opening = [ChatMessage("system", request.instructions)] if request.instructions else []
        return ChatRequest(
            model=request.model,
            messages=[*opening, *_messages(items)],
            tools=[_tool(*named) for named in _functions(request.tools or ()).items()],
            choice=choice_of(request.tool_choice),
            form=form_of((request.text or {}).get("format"), "text"),
            parallel=request.parallel_tool_calls is not False,
            most=request.max_output_tokens,
            stream=bool(request.stream),
            unapplied=request.unapplied,
            fields=request.model_dump(exclude={"input"}),
            items=items,
        )

    def write(self, request: ChatRequest, reply: Reply) -> Json:
        return _response(request, reply) | {
            "status": "incomplete" if reply.cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if reply.cut else None,
            "output": _output(request, reply),
            "usage": {
                "input_tokens": reply.read,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": reply.sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.read + reply.sampled,
            },
        }

    def stored(self, request: ChatRequest, reply: Reply) -> Items:
        """What later requests may name: the response, with all before it, and its items."""
        if request.fields.get("store") is False:
            return {}
        output = _output(request, reply)
        return {f"resp_{reply.name}": [*request.items, *output], **{item["id"]: [item] for item in output}}

    def events(self, request: ChatRequest, reply: Reply) -> list[str]:
        whole = self.write(request, reply)
        begun = _response(request, reply) | {"status": "in_progress", "output": [], "usage": None}
        kinds = ("response.created", "response.in_progress")
        steps: list[Json] = [{"type": kind, "response": begun} for kind in kinds]
        for at, item in enumerate(whole["output"]):
            steps += _item_events(item, {"output_index": at}, reply.thoughts)
        steps.append({"type": f"response.{whole['status']}", "response": whole})
        return [event(step | {"sequence_number": number}) for number, step in enumerate(steps)]

    def error(self, fault: Refused) -> Json:
        param = "input" if fault.param == "messages" else fault.param
        message = str(fault).replace("messages:", "input:", 1)
        return super().error(Refused(message, param, fault.status, fault.code))

    def failure(self, fault: Refused) -> str:
        return event({**self.error(fault)["error"], "type": "error"})


def _items(request: _Body, stored: Items) -> Iterator[Json]:
    """The items of a request behind those that it names."""
    previous = request.previous_response_id
    if previous is not None:
        yield from _stored(stored, previous, "previous_response_id", "previous_response_not_found")
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}
        return
    for at, item in enumerate(request.input):
        if item.get("type") == "item_reference":
            yield from _stored(stored, str(item.get("id")), f"input.{at}", "item_not_found")
        else:
            yield item


def _stored(stored: Items, name: str, where: str, code: str) -> Sequence[Json]:
    if name not in stored:
        raise Refused(f"{where}: no {name[:80]!r} is stored in this episode", where.partition(".")[0], 400, code)
    return stored[name]


def _functions(tools: Sequence[Item]) -> dict[str, Json]:
    """The functions that tools are, with their namespaces, by the names that the policy knows."""
    functions = dict[str, Json]()
    for at, tool in enumerate(tools):
        space = tool.get("name") if tool.get("type") == "namespace" else None
        members: Any = tool.get("tools") if space else [tool]
        for member in members if isinstance(members, list) else [members]:
            match member:
                case {"type": "function", "name": str(name)}:
                    functions[_joined(space, name)] = {**member, "namespace": space}
                case _:
                    kind = member.get("type") if isinstance(member, dict) else member
                    raise Refused(f"tools.{at}: a tool is a named function here, no {str(kind)[:80]}", "tools")
    return functions


def _tool(name: str, function: Item) -> Json:
    fields = {key: function[key] for key in ("description", "parameters") if key in function}
    return {"type": "function", "function": {"name": name, **fields}}


def _joined(space: Any, name: str) -> str:
    """The name by which the policy knows a function, of a namespace if there is one."""
    return f"{space}__{name}" if space else name


def _messages(items: Sequence[Item]) -> Iterator[ChatMessage]:
    """Items as messages; of the assistant thought, text and calls in this order are one."""
    groups = list[list[ChatMessage]]()
    last = -1  # place of an item in the assistant's message
    for at, item in enumerate(items):
        part = _message(item, f"input.{at}")
        place = _PLACES.index(item.get("type") or "message") if part.role == "assistant" else -1
        if 0 <= last < place or (place == last != _PLACES.index("message") and last >= 0):
            groups[-1].append(part)
        else:
            groups.append([part])
        last = place
    for group in groups:
        first = group[0]
        yield first._replace(
            text="".join(part.text for part in group),
            thought="\n".join(part.thought for part in group if part.thought),
            calls=tuple(chain.from_iterable(part.calls for part in group)),
        )


def _message(item: Item, where: str) -> ChatMessage:
    match item:
        case {"type": "function_call", "call_id": str(name), "name": str(tool), "arguments": str() | dict() as spelled}:
            return ChatMessage("assistant", calls=(ToolCall(name, _joined(item.get("namespace"), tool), spelled),))
        case {"type": "function_call_output", "call_id": str(name), "output": output}:
            return ChatMessage("tool", texts_of(output, f"{where}.output")[0], call_id=name)
        case {"type": "reasoning"}:
            parts = item.get("summary") or item.get("content")
            return ChatMessage("assistant", thought=texts_of(parts, f"{where}.summary")[1])
        case {"role": "system" | "developer" | "user" | "assistant" as role} if item.get("type") in (None, "message"):
            text, thought = texts_of(item.get("content"), f"{where}.content")
            return ChatMessage("system" if role == "developer" else role, text, thought)
    raise Refused(f"{where}: an item of type {str(item.get('type'))[:80]} in this form is not read here", "input")


def _response(request: ChatRequest, reply: Reply) -> Json:
    fields = request.fields
    head = {"id": f"resp_{reply.name}", "object": "response", "created_at": int(time.time()), "model": reply.model}
    repeated = {name: value if fields.get(name) is None else fields[name] for name, value in _REPEATED.items()}
    return head | {"error": None, "incomplete_details": None} | repeated


def _output(request: ChatRequest, reply: Reply) -> list[Json]:
    functions = _functions(request.fields.get("tools") or ())
    items = list[Json]()
    if reply.thought:
        summary = [{"type": "summary_text", "text": reply.thought}]
        items.append({"id": f"rs_{reply.name}", "type": "reasoning", "summary": summary})
    if reply.content or not reply.calls:
        content = [{"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}]
        items.append({"id": f"msg_{reply.name}", "type": "message", "role": "assistant", "content": content})
    for at, call in enumerate(reply.calls):
        item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.spelled}
        if space := functions.get(call.name, {}).get("namespace"):
            item |= {"namespace": space, "name": functions[call.name]["name"]}
        items.append({"id": f"fc_{reply.name}{at}", **item})
    status = "incomplete" if reply.cut else "completed"
    return [item | {"status": status} for item in items]


def _item_events(item: Json, place: Json, thoughts: Sequence[str]) -> Iterator[Json]:
    """An output item: opened without its text, the text at once, or a thought by its pieces, closed."""
    kind = item["type"]
    field = _TEXTS[kind]
    begun = item | {field: item[field][:0], "status": "in_progress"}
    yield {"type": "response.output_item.added", "item": begun, **place}
    inside = place | {"item_id": item["id"]}
    if kind == "function_call":
        name = "response.function_call_arguments"
        yield {"type": f"{name}.delta", "delta": item["arguments"], **inside}
        yield {"type": f"{name}.done", "arguments": item["arguments"], "name": item["name"], **inside}
    else:
        part_name, name = _PART_EVENTS[kind]
        [part] = item[field]
        inside |= {f"{field}_index": 0}
        yield {"type": f"{part_name}.added", "part": part | {"text": ""}, **inside}
        for piece in thoughts if kind == "reasoning" else [part["text"]]:
            yield {"type": f"{name}.delta", "delta": piece, "logprobs": [], **inside}
        yield {"type": f"{name}.done", "text": part["text"], "logprobs": [], **inside}
        yield {"type": f"{part_name}.done", "part": part, **inside}
    yield {"type": "response.output_item.done", "item": item, **place}
