from __future__ import annotations

import json
from typing import Any

import pytest

from agent_r1.envs.tool_env import ToolEnv
from agent_r1.records import CallStatus, Outcome, Question
from agent_r1.search.base import Search
from agent_r1.tools.base import Tool, ToolError, ToolResult
from agent_r1.tools.search import search_tool


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def env(question: Question, index: Search) -> ToolEnv:
    return ToolEnv(question, [search_tool(index, top_k=2)], max_steps=3)


def test_a_good_episode(env: ToolEnv) -> None:
    """Two searches find one new gold passage each, the second shows the first one again; then the answer."""
    first = env.step(call("search", query="Low Tide"))
    assert first.observation == "Low Tide: Low Tide is a film by Mara Quill."
    assert (first.tool, first.arguments, first.call_status) == ("search", '{"query": "Low Tide"}', CallStatus.OK)
    assert first.rewards == {"progress": 1.0}
    second = env.step(call("search", query="Mara Quill Low Tide"))
    assert second.rewards == {"progress": 1.0}
    last = env.step("<answer>in Tesk</answer>")
    assert last.outcome is Outcome.ANSWERED
    assert last.observation is None
    assert last.answer == "in Tesk"
    assert last.rewards == {"em": 0.0, "f1": pytest.approx(2 / 3)}  # precision 1/2, recall 1
    assert last.call_status is CallStatus.NONE


def test_a_search_that_finds_nothing_is_a_good_call(env: ToolEnv) -> None:
    transition = env.step(call("search", query="zzz"))
    assert transition.observation == "nothing found"
    assert transition.call_status is CallStatus.OK
    assert transition.rewards == {"progress": 0.0}


@pytest.mark.parametrize(
    ("action", "status", "told"),
    [
        ("Tesk", CallStatus.MALFORMED, "neither a tool call nor an answer"),
        ("<tool_call>{</tool_call>", CallStatus.MALFORMED, "not valid JSON"),
        (call("seek", query="x"), CallStatus.UNKNOWN_TOOL, "no tool 'seek', only search"),
        (call("search", text="x"), CallStatus.BAD_ARGUMENTS, "query: Field required"),
        (call("search", query=" "), CallStatus.FAILED, "the query is empty"),
    ],
)
def test_faults_are_told_and_the_episode_goes_on(env: ToolEnv, action: str, status: CallStatus, told: str) -> None:
    transition = env.step(action)
    assert transition.call_status is status
    assert transition.observation is not None
    assert transition.observation.startswith("Error: ")
    assert told in transition.observation
    assert transition.rewards == {}
    assert env.step("<answer>Tesk</answer>").rewards == {"em": 1.0, "f1": 1.0}


@pytest.mark.parametrize(
    ("last", "outcome"),
    [(call("search", query="Low Tide"), Outcome.TURN_LIMIT), ("Tesk", Outcome.MALFORMED)],
)
def test_out_of_steps(env: ToolEnv, last: str, outcome: Outcome) -> None:
    for _ in range(2):
        assert env.step(call("seek")).outcome is None
    transition = env.step(last)
    assert transition.outcome is outcome
    assert transition.observation is None
    assert transition.answer == ""
    with pytest.raises(AssertionError):
        env.step(last)


def test_the_last_call_still_counts(question: Question, index: Search) -> None:
    env = ToolEnv(question, [search_tool(index, top_k=2)], max_steps=1)
    assert env.step(call("search", query="Low Tide")).rewards == {"progress": 1.0}


def test_equal_arguments_read_equal(question: Question) -> None:
    def add(a: int, b: int) -> ToolResult:
        """Adds."""
        return ToolResult(text=str(a + b))

    env = ToolEnv(question, [Tool(add)], max_steps=2)
    assert env.step(call("add", b=2, a=1)).arguments == env.step(call("add", a=1, b=2)).arguments


def test_bugs_of_a_tool_are_raised(question: Question) -> None:
    def broken() -> ToolResult:
        """Breaks."""
        raise KeyError("ours")

    def refusing() -> ToolResult:
        """Refuses."""
        raise ToolError("theirs")

    env = ToolEnv(question, [Tool(broken), Tool(refusing)], max_steps=2)
    assert env.step(call("refusing")).observation == "Error: theirs"
    with pytest.raises(KeyError):
        env.step(call("broken"))
