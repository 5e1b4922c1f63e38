"""Episodes of agents outside against the built-in loop's: the same rows from the same draws."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent_r1.agents.task import Ending, Task
from agent_r1.envs.base import parse_action
from agent_r1.envs.kinds import attempts_at, played_by, require_playable
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import SYSTEM, advice, example_call
from agent_r1.params import SHIPPED, load
from agent_r1.records import CallStatus, Outcome, Question, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.collecting import collect_all
from agent_r1.rollout.episode import PLAY, StepView
from agent_r1.rollout.episodes import ScriptedSampler
from agent_r1.serving.agent import Agent
from agent_r1.serving.conversation import Screen
from agent_r1.serving.wire import Limits
from agent_r1.tools.base import Tool
from agent_r1.tools.search import search_tool
from tests.agents.conftest import http_of
from tests.agents.test_session import CALL, SEARCH
from tests.cases import tables
from tests.trajectories import question_fields

QUESTIONS = [
    Question(**question_fields(name, text=f"Who is {name}?", answers=["Quill"], gold_titles=["T"])) for name in "abcdef"
]
SCRIPTS = tables(Path(__file__).parent)["scripts"]


def as_built_in(tools: Sequence[Tool]) -> Callable[[Task], Any]:
    """An agent that does what the built-in loop does, with this project's tools and its reader of actions."""
    by_name = {tool.name: tool for tool in tools}

    async def told(action: str, question: str) -> tuple[str, str | None]:
        parsed = parse_action(action)
        if parsed.answer is not None:
            return "", parsed.answer
        if parsed.problem:
            call_of_first = example_call(tools[0].schema, question)
            return f"Error: {parsed.problem}. {advice(call_of_first, 'tagged')}", None
        [call] = parsed.calls
        if call.tool not in by_name:
            return f"Error: there is no tool {call.tool!r}, only {', '.join(by_name)}", None
        result = await by_name[call.tool].call(call.arguments)
        return (result.text if result.call_status is CallStatus.OK else f"Error: {result.text}"), None

    async def solve(task: Task) -> Ending:
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.text}]
        async with http_of(task) as client:
            while True:
                body = {"model": task.model, "messages": messages, "tools": [tool.schema for tool in tools]}
                answer = await client.post("/chat/completions", json=body)
                if answer.is_error:
                    return Ending(fault=answer.text)
                said = answer.json()["choices"][0]["message"]
                thought = said.get("reasoning_content")
                calls = [each["function"] for each in said.get("tool_calls", ())]
                spelled = [json.dumps({**each, "arguments": json.loads(each["arguments"])}) for each in calls]
                action = (f"<think>{thought}</think>" if thought else "") + (said["content"] or "")
                action += "".join(f"<tool_call>{each}</tool_call>" for each in spelled)
                reply, found = await told(action, task.text)
                if found is not None:
                    return Ending(answer=found)
                named = {"tool_call_id": said["tool_calls"][0]["id"]} if calls else {}
                messages += [said, {"role": "tool", "content": reply, **named}]

    return solve


def bits(found: Sequence[Trajectory]) -> list[Any]:
    return [
        (
            each.token_ids.tolist(), each.source.tolist(), each.logprobs.tolist(), each.context_starts, each.seed,
            [(step.action_start, step.action_stop, step.stop_reason, step.call_status) for step in each.steps],
            each.outcome, each.answer, [step.rewards.get("em") for step in each.steps],
        )
        for each in found
    ]  # fmt: skip


def test_agent_like_built_in_loop_has_its_rows(chat: Chat, hostile_index: Any, outside: Callable[..., Any]) -> None:
    def collected(shared: Shared) -> list[Trajectory]:
        attempts = attempts_at(QUESTIONS, shared)
        return collect_all(ScriptedSampler(SCRIPTS, chat), chat, attempts, shared, seed=7, play=PLAY)

    limits = {"max_tokens": 500, "max_action_tokens": 100, "order": "exact_arrival"}
    with Shared(load(SHIPPED).env.model_copy(update=limits), hostile_index) as shared:
        own = collected(shared)
    with outside(as_built_in([search_tool(hostile_index, top_k=2)]), hostile_index, limits) as shared:
        found = collected(shared)
        measures = shared.take_measures()
    ends = [Outcome.TURN_LIMIT, Outcome.MALFORMED, Outcome.TOKEN_LIMIT]
    assert [each.outcome for each in own] == [Outcome.ANSWERED] * 3 + ends
    for one, other in zip(bits(own), bits(found), strict=True):
        assert one == other
    assert (measures["agent/kept_share"], measures["agent/contexts"]) == (1.0, 1.0)


def test_row_that_names_its_agent_is_played_without_an_answer(chat: Chat, outside: Callable[..., Any]) -> None:
    row = Question(
        question_id="t-test-0", dataset="t", split="test", text="Mend it.", env="mine", setup='{"r": 1}', strata={}
    )
    heard: list[Mapping[str, Any]] = []

    async def solve(task: Task) -> Ending:
        heard.append(task.setup)
        async with http_of(task) as client:
            asked = {"model": task.model, "messages": [{"role": "user", "content": task.text}]}
            assert (await client.post("/chat/completions", json=asked)).status_code == 200
        return Ending(success=True)

    with outside(solve, env={"agent": None, "max_tokens": 500, "max_action_tokens": 100}) as shared:
        require_playable([row], shared.limits)
        [attempt] = attempts_at([row], shared)
        [found] = collect_all(ScriptedSampler([["Done."]], chat), chat, [attempt], shared, seed=7, play=PLAY)
    assert (attempt.agent, heard) == ("mine", [{"r": 1}])
    assert (found.outcome, found.success, found.answer) == (Outcome.ENDED, 1.0, "")
    with pytest.raises(ValueError, match="nobody plays 'mine' as 'random' does"):
        played_by("random", [attempt], [row], 0)


def test_a_person_asks_an_agent_outside(chat: Chat, outside: Callable[..., Any]) -> None:
    async def solve(task: Task) -> Ending:
        messages = [{"role": "user", "content": task.text}]
        async with http_of(task) as client:
            for reply in task.text.split()[1:]:
                asked = {"model": task.model, "messages": messages, "tools": [SEARCH]}
                answer = (await client.post("/chat/completions", json=asked)).json()
                messages += [said := answer["choices"][0]["message"]]
                messages += [
                    {"role": "tool", "tool_call_id": each["id"], "content": reply} for each in said["tool_calls"]
                ]
        return Ending(answer="Tesk")

    def asked(text: str) -> list[StepView]:
        with outside(solve, env={"max_tokens": 500, "max_action_tokens": 100}) as shared:
            return [*Agent(ScriptedSampler([[CALL] * 2], chat), chat, shared).ask(text, seed=0)]

    first, last = asked("Tell who is")
    assert (first.outcome, first.observations, first.answer) == (None, ("who",), "")
    assert (last.outcome, last.answer, last.action) == (Outcome.ANSWERED, "Tesk", CALL)
    screen = Screen(Console(file=(shown := io.StringIO()), width=100), Limits.of(load(SHIPPED).env))
    screen.ending([first, last], 0.0)
    assert shown.getvalue().split("\n")[:2] == ["  answer  Tesk", f"  2 steps, 2 calls, {last.tokens} tokens, 0.0 s"]
    with pytest.raises(ValueError, match=r"env\.agents\.mine ended as answered without asking the policy"):
        asked("Tell")
