"""Requests to a served agent and its answers: OpenAI's chat completions, with the agent's steps added.

An agent was trained on single questions, with a system message and tools of its own. So a request holds one user
message, and every field that could change how the agent acts is refused, not ignored.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from agent_r1.envs.base import parse_action
from agent_r1.params.env import EnvParams
from agent_r1.records import Outcome
from agent_r1.rollout.episode import StepView

FIELDS = "model, messages, stream, stream_options, temperature, seed, n and user"
_STEP = TypeAdapter(StepView)


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

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1024)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    n: Literal[1] | None = None
    user: str | None = None

    @classmethod
    def read(cls, body: bytes) -> Asked:
        """Parses a request. Raises ValueError that names the field that is wrong, unknown or not the client's."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as fault:
            problem = fault.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            reason = f"because the agent acts as it was trained; {FIELDS} are"
            raise ValueError(f"{where[:80]} is not the request's to say, {reason}")
        raise ValueError(f"{where}: {problem['msg']}" if where else problem["msg"])

    @property
    def question(self) -> str:
        return self.messages[0].text

    def require_askable(self, temperature: float) -> None:
        """Raises ValueError if an agent at this temperature cannot answer the request."""
        roles = [message.role for message in self.messages]
        if roles != ["user"]:
            raise ValueError(
                "the agent was trained to answer one question, with a system message of its own, and was sent "
                f"{len(roles)} messages ({', '.join(roles[:8])[:80]}); send one of role user that says all that matters"
            )
        if self.temperature not in (None, temperature):
            raise ValueError(
                f"the agent is served at temperature {temperature:g}, and asked for {self.temperature:g}; leave it out"
            )
        if not self.question.strip():
            raise ValueError("the question is empty; send one")


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

    object: str = "list"
    data: Annotated[list[Card], Field(min_length=1, max_length=1)]

    @classmethod
    def of(cls, name: str, env: EnvParams) -> Cards:
        return cls(data=[Card(id=name, agent_r1=Limits.of(env))])


class Fault(BaseModel):
    message: str


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

    def __init__(self, model: str) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

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
    if view.outcome is Outcome.ANSWERED:
        return f"{parse_action(view.action).thought}\n"
    return "\n".join([view.action, *view.observations, ""])


def usage(views: Sequence[StepView]) -> dict[str, int]:
    """Token counts: sampled by the policy, and read by it. Each token counts once."""
    sampled = sum(view.step.action_stop - view.step.action_start for view in views)
    total = views[-1].tokens
    return {"prompt_tokens": total - sampled, "completion_tokens": sampled, "total_tokens": total}


def _ending(view: StepView) -> str:
    return "stop" if view.outcome is Outcome.ANSWERED else "length"
