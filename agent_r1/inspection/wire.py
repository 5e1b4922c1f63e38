"""Requests to a served agent and its answers: OpenAI's chat completions, with the agent's steps added.

A request holds one question, as in training. Fields that would change the answer are refused, not ignored.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from agent_r1.envs.base import parse_action
from agent_r1.http.client import Fault
from agent_r1.params.env import EnvParams
from agent_r1.records import Outcome
from agent_r1.rollout.episode import StepView

_STEP = TypeAdapter(StepView)


# Fields that frameworks send whether they are used or not: the values, beside null, that change nothing.
_NEUTRAL: dict[str, list[Any]] = {
    "n": [1], "top_p": [1], "presence_penalty": [0], "frequency_penalty": [0], "logit_bias": [{}], "logprobs": [False],
    "top_logprobs": [0], "response_format": [{"type": "text"}], "modalities": [["text"]], "store": [False],
    "tools": [[]], "tool_choice": ["none", "auto"], "functions": [[]], "function_call": ["none", "auto"],
}  # fmt: skip


class Refused(ValueError):
    """A request that is refused with an error, because of its field `param` if it is one field."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class TextPart(BaseModel):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation. Other keys, such as a name, are ignored."""

    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Asked(BaseModel):
    """POST /v1/chat/completions"""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1024)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[str], Field(max_length=4)] | str | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    user: str | None = None

    @classmethod
    def read(cls, body: bytes) -> Asked:
        """Parses a request. Raises Refused that names the field that is wrong, or would change the answer."""
        try:
            asked = cls.model_validate_json(body)
        except ValidationError as fault:
            problem = fault.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"]))[:80]
            said = f"{where}: {problem['msg']}" if where else problem["msg"]
            raise Refused(said, where.partition(".")[0] or None) from None
        for name, given in (asked.model_extra or {}).items():
            neutral = [None, *_NEUTRAL.get(name, ())]
            if (given, isinstance(given, bool)) not in [(each, isinstance(each, bool)) for each in neutral]:
                taken = " or ".join(map(json.dumps, neutral))
                raise Refused(f"{name[:80]}: this agent takes {taken} alone; leave it out", name[:80])
        return asked

    @property
    def system(self) -> str:
        """The text of the messages before the question."""
        return "\n\n".join(message.text for message in self.messages[:-1] if message.text.strip())

    @property
    def question(self) -> str:
        """The question, below the system message."""
        return "\n\n".join(filter(None, (self.system, self.messages[-1].text)))

    def before_stop(self, answer: str) -> str:
        """An answer up to the first stop sequence."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return min((answer.partition(each)[0] for each in stops if each), key=len, default=answer)

    def require_askable(self, temperature: float, *, lenient: bool = False) -> None:
        """Raises Refused if an agent at this temperature, `lenient` towards system messages or not, cannot answer."""
        *before, last = [message.role for message in self.messages]
        if last != "user" or not {"system", "developer"}.issuperset(before):
            sent = f"and was sent {len(self.messages)} messages ({', '.join([*before, last][:8])[:80]})"
            raise Refused(f"this agent answers one question, in one message of role user, {sent}", "messages")
        if self.system and not lenient:
            raise Refused("this agent has its own system message; put this one into the user's message", "messages")
        if not self.messages[-1].text.strip():
            raise Refused("the question is empty; send one", "messages")
        if self.temperature not in (None, temperature):
            served = f"this agent is served at temperature {temperature:g}, and asked for {self.temperature:g}"
            raise Refused(f"{served}; leave it out", "temperature")


class Limits(BaseModel):
    """The limits of the agent's episodes that a client needs to know."""

    max_steps: int
    max_tokens: int
    parallel_calls: int

    @classmethod
    def of(cls, env: EnvParams) -> Limits:
        return cls(max_steps=env.max_steps, max_tokens=env.max_tokens, parallel_calls=env.parallel_calls)


class Card(BaseModel):
    """One agent in a list of models."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "agent_r1"
    limits: Limits = Field(alias="agent_r1")


class Cards(BaseModel):
    """The answer to GET /v1/models."""

    data: Annotated[list[Card], Field(min_length=1, max_length=1)]


class Event(BaseModel):
    """One event of a stream, as far as it is read: a step, or the fault that ended the episode."""

    agent_r1: StepView | None = None
    error: Fault | None = None

    @field_validator("agent_r1")
    @classmethod
    def _shows_json(cls, view: StepView | None) -> StepView | None:
        for call in view.step.calls if view else ():
            try:
                json.loads(call.arguments or "{}")
            except (ValueError, RecursionError):
                raise ValueError(f"the arguments of a call are no JSON: {call.arguments[:80]!r}") from None
        return view


class Completion:
    """The answers to one request, as JSON."""

    def __init__(self, asked: Asked) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
        if asked.system:
            self._head["system_fingerprint"] = "system message put before the question"

    def whole(self, views: Sequence[StepView]) -> dict[str, Any]:
        """A whole episode."""
        said = {"role": "assistant", "content": views[-1].answer, "reasoning_content": "".join(map(told, views))}
        choice = {"index": 0, "message": said, "finish_reason": _ending(views[-1]), "logprobs": None}
        steps = [_STEP.dump_python(view, mode="json") for view in views]
        return self._head | {
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(views),
            "agent_r1": {"outcome": views[-1].outcome, "steps": steps},
        }

    def step(self, view: StepView) -> dict[str, Any]:
        """One step of a stream. The last step has the answer."""
        delta = {"role": "assistant", "reasoning_content": told(view)}
        if view.outcome is not None:
            delta["content"] = view.answer
        choice = {"index": 0, "delta": delta, "finish_reason": _ending(view) if view.outcome else None}
        return self._chunk([choice]) | {"agent_r1": _STEP.dump_python(view, mode="json")}

    def used(self, views: Sequence[StepView]) -> dict[str, Any]:
        """The token counts that end a stream if the client asked for them."""
        return self._chunk([]) | {"usage": usage(views)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk", "choices": choices}


def told(view: StepView) -> str:
    """The text of a step on the way to the answer: thought, calls and replies."""
    if view.outcome is Outcome.ANSWERED or view.answer:
        return f"{parse_action(view.action).thought}\n"
    return "\n".join([view.action, *view.observations, ""])


def usage(views: Sequence[StepView]) -> dict[str, int]:
    """Token counts: sampled by the policy, and read by it. Each token counts once."""
    sampled = sum(view.step.action_stop - view.step.action_start for view in views)
    total = views[-1].tokens
    return {"prompt_tokens": total - sampled, "completion_tokens": sampled, "total_tokens": total}


def _ending(view: StepView) -> str:
    return "stop" if view.outcome is Outcome.ANSWERED else "length"
