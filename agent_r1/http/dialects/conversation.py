"""What every dialect is read into, one request and its messages, and what each writes, one reply."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from agent_r1.http.client import Shape

MOST_MESSAGES = 1024
MOST_TOOLS = 128
Content = str | list[dict[str, Any]] | None  # of a message; a list holds parts
Items = Mapping[str, list[dict[str, Any]]]  # what an episode stored, by the id of a response or of one item


class Refused(ValueError):
    """A request that is refused with an error, because of its field `param` if it is one field."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class ToolCall(NamedTuple):
    """A call that a message of the assistant holds."""

    id: str
    name: str
    arguments: str | dict[str, Any]  # a text of JSON, or an object

    @property
    def spelled(self) -> str:
        """Its arguments as JSON."""
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)


class ChatMessage(NamedTuple):
    """A message of a conversation."""

    role: str  # system, user, assistant or tool
    text: str = ""
    thought: str = ""  # of the assistant, if it was sent
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""  # of the call whose result this is


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A request for the next action in a conversation."""

    model: str
    messages: Sequence[ChatMessage]
    tools: Sequence[dict[str, Any]] = ()  # in the OpenAI function form
    tool_choice: str = "auto"  # or none
    parallel: bool = True  # several calls in an action
    most: int | None = None  # tokens that the action may have
    stops: Sequence[str] = ()  # texts that end it
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    with_usage: bool = False  # at the end of a stream of chat completions
    fields: Mapping[str, Any] = field(default_factory=dict)  # as they were sent
    items: Sequence[dict[str, Any]] = ()  # of Responses, with those that were stored

    @property
    def spelled_tools(self) -> str:
        return json.dumps(self.tools)


class Reply(NamedTuple):
    """An action as a client sees it."""

    name: str  # in ids
    model: str
    thought: str
    content: str
    calls: Sequence[ToolCall]  # with objects of arguments
    cut: bool  # at the limit of tokens
    stop: str | None  # the text that ended it
    read: int  # tokens of the context
    sampled: int  # tokens of the action


class Dialect(Protocol):
    """A module that reads and writes one API."""

    PATH: str

    def read(self, body: bytes, stored: Items) -> ChatRequest:
        """A request. Raises Refused that names the field that is wrong, or would change the answer."""
        ...

    def write(self, request: ChatRequest, reply: Reply) -> dict[str, Any]:
        """A reply as the body of an answer."""
        ...

    def events(self, request: ChatRequest, reply: Reply) -> str:
        """A reply as a stream, the whole action in one event."""
        ...


def texts_of(content: Content, where: str) -> tuple[str, str]:
    """The text and the thought of a message's content. Raises Refused for a part that is neither."""
    if isinstance(content, str):
        return content, ""
    texts = list[str]()
    thoughts = list[str]()
    for at, part in enumerate(content or ()):
        match part:
            case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "summary_text" | "reasoning_text", "text": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                pass
            case _:
                kind = str(part.get("type"))[:80]
                field = where.partition(".")[0]
                raise Refused(f"{where}.{at}: a part of type {kind} is no text, and text alone is read", field)
    return "\n".join(texts), "\n".join(thoughts)


class Body(BaseModel):
    """The fields of a request that matter. Others that would change the answer are refused, not ignored."""

    model_config = ConfigDict(extra="allow")

    # Fields that frameworks send whether they are used or not: the values, beside null, that change nothing.
    neutral: ClassVar[dict[str, list[Any]]] = {
        "n": [1], "presence_penalty": [0], "frequency_penalty": [0], "logit_bias": [{}],
        "logprobs": [False], "top_logprobs": [0], "response_format": [{"type": "text"}], "modalities": [["text"]],
        "store": [False], "functions": [[]], "function_call": ["none", "auto"],
    }  # fmt: skip

    model: str
    stream: bool | None = False

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Parses a request. Raises Refused that names the field that is wrong, or would change the answer."""
        request = read(cls, body)
        for name, value in (request.model_extra or {}).items():
            neutral = [None, *cls.neutral.get(name, ())]
            if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in neutral):
                choices = " or ".join(map(json.dumps, neutral))
                raise Refused(f"{name[:80]}: this agent takes {choices} alone; leave it out", name[:80])
        return request


def read(kind: type[Shape], body: bytes) -> Shape:
    """A body of JSON in a shape. Raises Refused that names the field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as fault:
        problem = fault.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))[:80]
        message = f"{where}: {problem['msg']}" if where else problem["msg"]
        raise Refused(message, where.partition(".")[0] or None) from None


def event(content: Mapping[str, Any]) -> str:
    """One event of a stream, with its type if it has one."""
    kind = f"event: {content['type']}\n" if "type" in content else ""
    return f"{kind}data: {json.dumps(content, ensure_ascii=False)}\n\n"
