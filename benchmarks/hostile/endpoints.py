"""What endpoints answer, completions and an agent's steps, and what callers ask of a served agent."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random

from pydantic import TypeAdapter
from rich.console import Console

from agent_r1.http.client import Answer
from agent_r1.http.dialects.chat import ChatCompletions
from agent_r1.http.endpoint import MAX_TEXT, Endpoint
from agent_r1.records import Call, CallStatus, Step, StopReason
from agent_r1.rollout.episode import StepView
from agent_r1.serving.conversation import Screen
from agent_r1.serving.wire import Cards, Event, Limits, Questioned
from benchmarks.hostile.kind import Kind, require
from benchmarks.hostile.mutations import as_bytes, as_json, mutated, odd_value
from benchmarks.hostile.servers import Scripted, answered

_URL = "http://127.0.0.1:1"
_LIMITS = Limits(max_steps=5, max_tokens=512, parallel_calls=1)
_STEP = Step(
    action_start=40,
    action_stop=50,
    stop_reason=StopReason.END,
    calls=[Call(tool="search", arguments='{"query": "Kiss"}', status=CallStatus.OK)],
    rewards={"think": 1.0},
)
_VIEW = StepView(
    step=_STEP,
    action='<think>x</think><tool_call>{"name": "search", "arguments": {"query": "Kiss"}}</tool_call>',
    observations=("Kiss: a film.",),
    outcome=None,
    answer="",
    fault="",
    tokens=60,
)


class EndpointAnswers(Kind):
    """What an endpoint may answer to an evaluation, and to those who chat with an agent."""

    name, tried = "endpoint answers", 2000

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._endpoint = Endpoint(_URL, timeout_s=1)

    def make(self, rng: Random) -> tuple[str, Answer]:
        said = {"message": {"content": "<answer>Kiss</answer>"}, "finish_reason": "stop"}
        honest = {
            "complete": {"choices": [said]},
            "cards": {"data": [{"id": "ppo", "agent_r1": _LIMITS.model_dump()}]},
            "event": {"agent_r1": TypeAdapter(StepView).dump_python(_VIEW, mode="json")},
        }
        asked = rng.choice([*honest])
        return asked, answered(honest[asked], rng)

    def judge(self, made: tuple[str, Answer]) -> None:
        asked, answer = made
        self._endpoint._client = Scripted(answer)
        if asked == "complete":
            text = self._endpoint.complete("m", [("user", "Who?")], {"max_tokens": 9, "temperature": 0}).text
            require(len(text.encode()) <= 4 * MAX_TEXT, "a text longer than any is read")
        elif asked == "cards":
            self._endpoint.describe(Cards)
        else:
            with self._endpoint._named():
                view = answer.parse(Event).agent_r1
            if view:
                file = io.StringIO()
                Screen(Console(file=file, highlight=False, force_terminal=False), _LIMITS).step(view)
                require(file.getvalue().replace("\n", "").isprintable(), "a step that does more than show itself")

    def names(self, made: tuple[str, Answer]) -> tuple[str, ...]:
        return (_URL, "Expecting", "Extra data")


class AgentRequests(Kind):
    """What callers may ask of a served agent."""

    name, tried = "agent requests", 500

    def make(self, rng: Random) -> bytes:
        message = {"role": "user", "content": rng.choice(("Who?", [{"type": "text", "text": "Who?"}]))}
        fields = {"stream": True, "seed": 3, "temperature": 0, "max_tokens": 9, "stop": ["."], "top_p": 1, "tools": []}
        honest = {"model": "ppo", "messages": [{"role": "system", "content": ""}, message], **fields}
        made = odd_value(rng) if rng.random() < 0.1 else mutated(honest, rng, rng.choice((0, 1, 2)))
        return as_bytes(as_json(made, rng), rng)

    def judge(self, made: bytes) -> None:
        asked = Questioned(ChatCompletions().read(made, {}))
        asked.require_askable()
        require(bool(asked.question.encode().strip()), "a question that asks nothing")
