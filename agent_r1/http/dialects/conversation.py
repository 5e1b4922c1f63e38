"""What every dialect is read into, one request and its messages, and what each writes, one reply."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_r1.http.client import Shape
from agent_r1.records import Json

MOST_MESSAGES = 1024
MOST_TOOLS = 128
# Fields that are taken, and change no token.
_UNREAD = {
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "reasoning", "reasoning_effort", "thinking", "verbosity", "chat_template_kwargs", "metadata",
    "user", "service_tier", "store", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "cache_control", "include", "include_obfuscation", "truncation", "context_management", "client_metadata",
    "stream_options",
}  # fmt: skip
Content = str | list[Json] | None  # of a message; a list holds parts
Items = Mapping[str, list[Json]]  # what an episode stored, by the id of a response or of one item


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
    arguments: str | Json  # a text of JSON, or an object

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


class ToolChoice(NamedTuple):
    """Which calls an action has to hold."""

    kind: str  # auto, none or required
    tool: str = ""  # the only one that may be called, if one is named


class TextForm(NamedTuple):
    """The form that an action without calls has to have."""

    field: str  # of the request
    schema: Json  # of an object


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A request for the next action in a conversation."""

    model: str
    messages: Sequence[ChatMessage]
    tools: Sequence[Json] = ()  # in the OpenAI function form
    choice: ToolChoice
    form: TextForm | None = None
    parallel: bool = True  # several calls in an action
    most: int | None = None  # tokens that the action may have
    stops: Sequence[str] = ()  # texts that end it
    seed: int | None = None
    stream: bool = False
    with_usage: bool = False  # at the end of a stream of chat completions
    unapplied: Set[str] = frozenset()  # fields that were sent, and change no token
    fields: Mapping[str, Any] = field(default_factory=dict)  # of Responses, as they were sent
    items: Sequence[Json] = ()  # of Responses, with those that were stored

    @property
    def spelled_schemas(self) -> str:
        """Its tools, and the form of its text, as JSON."""
        return json.dumps([self.tools, self.form])


class Reply(NamedTuple):
    """An action as a client sees it."""

    name: str  # in ids
    model: str
    thoughts: Sequence[str]  # the pieces of its thought; a stream has an event for each
    content: str
    calls: Sequence[ToolCall]  # with objects of arguments
    cut: bool  # at the limit of tokens
    stop: str | None  # the text that ended it
    read: int  # tokens of the context
    sampled: int  # tokens of the action

    @property
    def thought(self) -> str:
        """The whole of it."""
        return "".join(self.thoughts)


def texts_of(content: Any, where: str) -> tuple[str, str]:
    """The text and the thought of a message's content. Raises Refused for what is neither."""
    texts = list[str]()
    thoughts = list[str]()
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
    for at, part in enumerate(parts if isinstance(parts, list | tuple) else [parts]):
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
                kind = part.get("type") if isinstance(part, dict) else part
                field = where.partition(".")[0]
                raise Refused(f"{where}.{at}: {str(kind)[:80]!r} is no text, and text alone is read", field)
    return "\n".join(texts), "\n".join(thoughts)


def choice_of(choice: Any) -> ToolChoice:
    """A tool choice of any dialect. Raises Refused for another."""
    match choice:
        case None:
            return ToolChoice("auto")
        case "auto" | "none" | "required" as kind:
            return ToolChoice(kind)
        case {"type": "auto" | "none" as kind}:
            return ToolChoice(kind)
        case {"type": "any"}:
            return ToolChoice("required")
        case {"type": "function" | "tool", "name": str(name)} | {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", name)
    raise Refused("tool_choice: takes auto, none, required or the name of a function", "tool_choice")


def form_of(form: Any, name: str) -> TextForm | None:
    """The form of a text by the field of this name. Raises Refused for one that is not known."""
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return TextForm(name, {"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return TextForm(name, {"type": "object", **schema})
        case {"type": "json_schema", "schema": dict(schema)}:
            return TextForm(name, {"type": "object", **schema})
    raise Refused(f"{name}: takes text, json_object, or json_schema with a schema", name)


class Body(BaseModel):
    """The fields of a request that matter. Others that would change the episode are refused, not ignored."""

    model_config = ConfigDict(extra="allow")

    # Fields that frameworks send whether they are used or not: the values, beside null, that change nothing.
    neutral: ClassVar[dict[str, list[Any]]] = {
        "n": [1], "logit_bias": [{}], "logprobs": [False], "top_logprobs": [0], "modalities": [["text"]],
        "functions": [[]], "function_call": ["none", "auto"], "background": [False], "mcp_servers": [[]],
    }  # fmt: skip

    model: str
    stream: bool | None = False
    tools: Annotated[list[Json], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Any = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Parses a request. Raises Refused that names the field that is wrong, or would change the answer."""
        request = read(cls, body)
        for name, value in request.extra.items():
            neutral = [None, *cls.neutral.get(name, ())]
            same = any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in neutral)
            if name not in _UNREAD and not same:
                choices = " or ".join(map(json.dumps, neutral))
                raise Refused(f"{name[:80]}: {choices} alone is taken here; leave it out", name[:80])
        return request

    @property
    def extra(self) -> Json:
        """The other fields."""
        return self.model_extra or {}

    @property
    def unapplied(self) -> Set[str]:
        """The fields that are taken, and change no token."""
        return _UNREAD & {name for name, value in self.extra.items() if value not in (None, [], {})}


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


class Dialect(ABC):
    """An API by which clients ask."""

    path: ClassVar[str]
    opening: ClassVar[int] = 0  # events of a stream that stand before the first of a thought

    @abstractmethod
    def read(self, body: bytes, stored: Items) -> ChatRequest:
        """A request. Raises Refused that names the field that is wrong, or would change the episode."""

    @abstractmethod
    def write(self, request: ChatRequest, reply: Reply) -> Json:
        """A reply as the body of an answer."""

    @abstractmethod
    def events(self, request: ChatRequest, reply: Reply) -> list[str]:
        """A reply as the events of a stream, each text but a thought's in one."""

    def stored(self, request: ChatRequest, reply: Reply) -> Items:
        """What later requests of the episode may name of a reply."""
        return {}

    def error(self, fault: Refused) -> Json:
        """A refusal as the body of an answer; OpenAI's form, like that of vLLM's server."""
        kind = "invalid_request_error" if fault.status < 500 else "server_error"
        return {"error": {"message": str(fault), "type": kind, "param": fault.param, "code": fault.code}}

    def failure(self, fault: Refused) -> str:
        """A refusal in the middle of a stream."""
        return event(self.error(fault))
