"""Questions to a served agent and its answers, to which its steps are added."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter, field_validator

from agent_r1.envs.base import Conversation, parse_action
from agent_r1.http.client import Fault
from agent_r1.http.dialects.chat import DONE, ChatCompletions, ending, head, usage
from agent_r1.http.dialects.conversation import ChatRequest, Dialect, Refused, Reply, event
from agent_r1.params.env import Answers, EnvParams
from agent_r1.records import Json, Outcome
from agent_r1.rollout.episode import StepView

_STEP = TypeAdapter(StepView)
IN_TURN = {("user", "assistant"), ("assistant", "user"), ("user", "user")}  # a question may have got no answer


@dataclass(frozen=True, slots=True)
class Questioned:
    """A request that ends with a question, behind earlier ones with their answers."""

    request: ChatRequest

    @property
    def system(self) -> str:
        """The text of the client's system messages."""
        messages = self.request.messages
        return "\n\n".join(message.text for message in messages if message.role == "system" and message.text.strip())

    @property
    def question(self) -> str:
        """The question, below the system message."""
        return "\n\n".join(filter(None, (self.system, self.request.messages[-1].text)))

    def exchanges(self, answers: Answers) -> list[Conversation]:
        """The earlier questions that were answered, as the policy writes an answer. Raises Refused for any other."""
        turns = [message for message in self.request.messages if message.role != "system"]
        exchanges = list[Conversation]()
        for question, answer in pairwise(turns):
            text = answer.text.strip()
            if answer.role == "user" or not text:
                continue
            action = text if answers == "plain" else f"<answer>{text}</answer>"
            if parse_action(action, answers=answers).answer != text:
                raise Refused(f"no answer of this agent's reads {text[:80]!r}; leave tags out of it", "messages")
            fields = {"where": "", "dataset": "", "replies": "tool", "system": "", "user": question.text}
            exchanges.append(Conversation(**fields, actions=[action], observations=[]))
        return exchanges

    def before_stop(self, answer: str) -> str:
        """An answer up to the first stop sequence."""
        return min((answer.partition(stop)[0] for stop in self.request.stops), key=len, default=answer)

    def require_askable(self) -> None:
        """Raises Refused if an agent with tools and words of its own cannot answer."""
        request = self.request
        field = "tool_choice" if request.choice.kind == "required" else request.form and request.form.field
        if field:
            raise Refused(f"{field}: this agent has its own tools, and answers in its own form; leave it out", field)
        roles = [message.role for message in request.messages if message.role != "system"]
        if request.messages[-1].role != "user" or not {*pairwise(["assistant", *roles])} <= IN_TURN:
            turns = f"and was sent {len(request.messages)} messages ({', '.join(roles[:8])[:80]})"
            raise Refused(f"this agent answers user and assistant in turn, the user last, {turns}", "messages")
        if not request.messages[-1].text.strip():
            raise Refused("the question is empty; send one", "messages")


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
    """The answers to one request."""

    def __init__(self, dialogue: Questioned) -> None:
        self._name = uuid.uuid4().hex
        self._request = dialogue.request
        self._model = dialogue.request.model
        remarks = {
            "system message put before the question": dialogue.system,
            "tools of the client not called": dialogue.request.tools,
        }
        words = ", ".join(remark for remark, applies in remarks.items() if applies)
        self._fields = {"system_fingerprint": words} if words else {}

    def reply(self, views: Sequence[StepView]) -> Reply:
        """A whole episode. Its tokens were sampled by the policy, or read by it; each counts once."""
        sampled = sum(view.step.action_stop - view.step.action_start for view in views)
        return Reply(
            name=self._name,
            model=self._model,
            thoughts=[*map(step_text, views)],
            content=views[-1].answer,
            calls=(),
            cut=views[-1].outcome is not Outcome.ANSWERED,
            stop=None,
            read=views[-1].tokens - sampled,
            sampled=sampled,
        )

    def extra(self, views: Sequence[StepView]) -> Json:
        """What stands in a whole answer of any dialect beside its own fields."""
        steps = [_STEP.dump_python(view, mode="json") for view in views]
        return self._fields | {"agent_r1": {"outcome": views[-1].outcome, "steps": steps}}

    def events(self, dialect: Dialect, views: Sequence[StepView]) -> list[str]:
        """The events of a stream, up to those of the last of these steps."""
        is_over = views[-1].outcome is not None
        if not isinstance(dialect, ChatCompletions):
            events = dialect.events(self._request, self.reply(views))
            return events if is_over else events[: dialect.opening + len(views)]
        chunks = [*map(self.step, views)]
        if is_over and self._request.with_usage:
            chunks.append(self.used(views))
        return [*map(event, chunks), *[DONE][:is_over]]

    def step(self, view: StepView) -> Json:
        """One step of a stream. The last step has the answer."""
        delta = {"role": "assistant", "reasoning_content": step_text(view)}
        if view.outcome is not None:
            delta["content"] = view.answer
        reply = self.reply([view])
        choice = {"index": 0, "delta": delta, "finish_reason": ending(reply) if view.outcome else None}
        return self._chunk(reply, [choice]) | {"agent_r1": _STEP.dump_python(view, mode="json")}

    def used(self, views: Sequence[StepView]) -> Json:
        """The token counts that end a stream if the client asked for them."""
        reply = self.reply(views)
        return self._chunk(reply, []) | {"usage": usage(reply)}

    def _chunk(self, reply: Reply, choices: list[Json]) -> Json:
        return head(reply, "chat.completion.chunk", choices) | self._fields


def step_text(view: StepView) -> str:
    """The text of a step on the way to the answer: thought, calls and replies."""
    if view.outcome is Outcome.ANSWERED or view.answer:
        return f"{parse_action(view.action).thought}\n"
    return "\n".join([view.action, *view.observations, ""])
