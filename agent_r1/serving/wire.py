"""Requests to a served agent and its answers: OpenAI's chat completions, with the agent's steps added."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, field_validator

from agent_r1.envs.base import Conversation, parse_action
from agent_r1.http.client import Fault
from agent_r1.http.completions import Asked, Refused
from agent_r1.params.env import Answers, EnvParams
from agent_r1.records import Outcome
from agent_r1.rollout.episode import StepView

_STEP = TypeAdapter(StepView)


INSTRUCTING = ("system", "developer")  # roles


class Questioned(Asked):
    """A request that ends with a question, behind earlier ones with their answers."""

    @property
    def system(self) -> str:
        """The text of the client's system messages."""
        return "\n\n".join(
            message.text for message in self.messages if message.role in INSTRUCTING and message.text.strip()
        )

    @property
    def question(self) -> str:
        """The question, below the system message."""
        return "\n\n".join(filter(None, (self.system, self.messages[-1].text)))

    def exchanges(self, answers: Answers) -> list[Conversation]:
        """The earlier questions that were answered, as the policy writes an answer. Raises Refused for any other."""
        turns = [message for message in self.messages if message.role not in INSTRUCTING]
        exchanges = list[Conversation]()
        for question, answer in zip(turns[:-1:2], turns[1::2], strict=True):
            text = answer.text.strip()
            action = text if answers == "plain" else f"<answer>{text}</answer>"
            if text and parse_action(action, answers=answers).answer != text:
                raise Refused(f"no answer of this agent's reads {text[:80]!r}; leave tags out of it", "messages")
            if text:
                fields = {"where": "", "dataset": "", "replies": "tool", "system": "", "user": question.text}
                exchanges.append(Conversation(**fields, actions=[action], observations=[]))
        return exchanges

    def before_stop(self, answer: str) -> str:
        """An answer up to the first stop sequence."""
        return min((answer.partition(stop)[0] for stop in self.stops), key=len, default=answer)

    def require_askable(self, temperature: float) -> None:
        """Raises Refused if an agent at this temperature cannot answer."""
        roles = [message.role for message in self.messages if message.role not in INSTRUCTING]
        in_turn = [*islice(cycle(["user", "assistant"]), len(roles))]
        if self.messages[-1].role != "user" or roles != in_turn:
            turns = f"and was sent {len(self.messages)} messages ({', '.join(roles[:8])[:80]})"
            raise Refused(f"this agent answers user and assistant in turn, the user last, {turns}", "messages")
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
    answers: Answers = "tagged"

    @classmethod
    def of(cls, env: EnvParams) -> Limits:
        return cls(
            max_steps=env.max_steps,
            max_tokens=env.max_tokens,
            parallel_calls=env.parallel_calls,
            answers=env.answers,
        )


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

    def __init__(self, request: Questioned) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model}
        if request.system:
            self._head["system_fingerprint"] = "system message put before the question"

    def whole(self, views: Sequence[StepView]) -> dict[str, Any]:
        """A whole episode."""
        message = {
            "role": "assistant",
            "content": views[-1].answer,
            "reasoning_content": "".join(map(step_text, views)),
        }
        choice = {"index": 0, "message": message, "finish_reason": _ending(views[-1]), "logprobs": None}
        steps = [_STEP.dump_python(view, mode="json") for view in views]
        return self._head | {
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(views),
            "agent_r1": {"outcome": views[-1].outcome, "steps": steps},
        }

    def step(self, view: StepView) -> dict[str, Any]:
        """One step of a stream. The last step has the answer."""
        delta = {"role": "assistant", "reasoning_content": step_text(view)}
        if view.outcome is not None:
            delta["content"] = view.answer
        choice = {"index": 0, "delta": delta, "finish_reason": _ending(view) if view.outcome else None}
        return self._chunk([choice]) | {"agent_r1": _STEP.dump_python(view, mode="json")}

    def used(self, views: Sequence[StepView]) -> dict[str, Any]:
        """The token counts that end a stream if the client asked for them."""
        return self._chunk([]) | {"usage": usage(views)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk", "choices": choices}


def step_text(view: StepView) -> str:
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
