import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_r1.envs.base import Env, Transition
from agent_r1.envs.kinds import attempts_at, require_playable
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import (
    CLOSED_BOOK,
    FROM_PASSAGES,
    AnswerEnv,
    ToolEnv,
    asked_attempt,
    closed_book_attempts,
    gold_passages_attempts,
    naive_rag_attempts,
)
from agent_r1.faults import WorldFault, WorldTimeout
from agent_r1.params import load
from agent_r1.records import CallStatus, Outcome, Passage, Question
from agent_r1.search.base import Search
from agent_r1.search.index import Cached
from agent_r1.tools.base import FunctionTool, ToolError
from agent_r1.tools.search import search_tool
from tests.cases import cases
from tests.envs.conftest import PASSAGES

PARAMS = load(Path(__file__).parents[2] / "params.yaml").env


def act(env: Env, action: str) -> Transition:
    return asyncio.run(env.step(action))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def env(question: Question, index: Search) -> ToolEnv:
    return ToolEnv(question, [search_tool(index, top_k=2)], max_steps=3)


def test_a_good_episode(env: ToolEnv) -> None:
    """Two searches find one new gold passage each, the second shows the first one again; then the answer."""
    assert env.state == ""
    first = act(env, f"<think>The director.</think>{call('search', query='Low Tide')}")
    assert first.observations == ("Low Tide: Low Tide is a film by Mara Quill.",) == (env.state,)
    [made] = first.calls
    assert (made.tool, made.arguments, made.status) == ("search", '{"query": "Low Tide"}', CallStatus.OK)
    assert (first.rewards, first.rewards_when_read) == ({"think": 1.0}, {"progress": 1.0})
    second = act(env, call("search", query="Mara Quill Low Tide"))
    assert (second.rewards, second.rewards_when_read) == ({"think": 0.0}, {"progress": 1.0})
    last = act(env, "<answer>in Tesk</answer>")
    assert (last.outcome, last.observations, last.answer) == (Outcome.ANSWERED, (), "in Tesk")
    # F1: precision 1/2, recall 1. "Mara Quill was born in Tesk" holds the answer's words in a row.
    assert last.rewards == {"em": 0.0, "f1": pytest.approx(2 / 3), "grounded": 1.0, "think": 0.0}
    assert last.call_status is CallStatus.NONE


def test_a_search_that_finds_nothing_is_a_good_call(env: ToolEnv) -> None:
    found = act(env, call("search", query="zzz"))
    assert (found.observations, found.call_status) == (("nothing found",), CallStatus.OK)
    assert found.rewards_when_read == {"progress": 0.0}


def test_a_question_whose_answer_nobody_knows(index: Search) -> None:
    """The same prompt and replies as with gold answers; what would be compared with them is left out, not 0."""
    env = ToolEnv("Where was the director of Low Tide born?", [search_tool(index, top_k=2)], max_steps=3)
    assert env.user == "Where was the director of Low Tide born?"
    found = act(env, call("search", query="Low Tide"))
    assert found.observations == ("Low Tide: Low Tide is a film by Mara Quill.",)
    assert (found.rewards, found.rewards_when_read) == ({"think": 0.0}, {})
    last = act(env, "<think>Now.</think><answer>Mara Quill</answer>")
    assert (last.outcome, last.answer) == (Outcome.ANSWERED, "Mara Quill")
    assert last.rewards == {"grounded": 1.0, "think": 1.0}


@pytest.mark.parametrize(
    ("fault", "status"), [(WorldFault("down"), CallStatus.FAILED), (WorldTimeout("slow"), CallStatus.TIMEOUT)]
)
def test_world_fault_ends_episode_without_reward(question: Question, fault: WorldFault, status: CallStatus) -> None:
    class Down(Search):
        def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            raise fault

    env = ToolEnv(question, [search_tool(Down(), top_k=2)], max_steps=3)
    ended = act(env, f"<think>Look.</think>{call('search', query='Low Tide')}")
    assert (ended.outcome, ended.fault, ended.call_status) == (Outcome.ABORTED, str(fault), status)
    assert [(made.tool, made.arguments) for made in ended.calls] == [("search", '{"query": "Low Tide"}')]
    assert (ended.observations, ended.rewards, ended.rewards_when_read) == ((), {}, {})


@cases("action, think")
def test_think_is_a_thought_before_a_well_formed_action(env: ToolEnv, action: str, think: float) -> None:
    assert act(env, action).rewards["think"] == think


@cases("before, answer, grounded")
def test_answer_is_grounded_in_shown_results(env: ToolEnv, before: list[str], answer: str, grounded: float) -> None:
    for action in before:
        assert act(env, action).observations
    assert act(env, f"<answer>{answer}</answer>").rewards["grounded"] == grounded


@cases("action, status, told")
def test_faults_are_told_and_the_episode_goes_on(env: ToolEnv, action: str, status: str, told: str) -> None:
    transition = act(env, action)
    assert transition.call_status == status
    [said] = transition.observations
    assert said.startswith("Error: ")
    assert told in said
    assert (transition.rewards, transition.rewards_when_read) == ({"think": 0.0}, {})
    assert act(env, "<answer>Tesk</answer>").rewards == {"em": 1.0, "f1": 1.0, "grounded": 0.0, "think": 0.0}


@pytest.mark.parametrize(
    ("last", "outcome"), [(call("search", query="Low Tide"), Outcome.TURN_LIMIT), ("Tesk", Outcome.MALFORMED)]
)
def test_out_of_steps(env: ToolEnv, last: str, outcome: Outcome) -> None:
    for _ in range(2):
        assert act(env, call("seek")).outcome is None
    transition = act(env, last)
    assert (transition.outcome, transition.observations, transition.answer) == (outcome, (), "")
    # That the last call was a good one is a fact; nobody reads its result.
    assert transition.call_status is (CallStatus.OK if outcome is Outcome.TURN_LIMIT else CallStatus.MALFORMED)
    assert (transition.rewards, transition.rewards_when_read) == ({"think": 0.0}, {})
    with pytest.raises(RuntimeError, match="over"):
        act(env, last)


def test_bugs_of_a_tool_are_raised_and_equal_arguments_read_equal(question: Question) -> None:
    def broken(message: str, times: int) -> str:
        """Breaks, or refuses a message."""
        if message:
            raise ToolError(message)
        raise KeyError("ours")

    env = ToolEnv(question, [FunctionTool(broken)], max_steps=3)
    [one], [other] = (
        act(env, call("broken", **arguments)).calls
        for arguments in ({"message": "theirs", "times": 1}, {"times": 1, "message": "theirs"})
    )
    assert (one.arguments, env.state) == (other.arguments, "Error: theirs")
    with pytest.raises(KeyError):
        act(env, call("broken", message="", times=1))


TWICE = [Passage(passage_id=str(i), title="Mara Quill", text=f"Part {i}.") for i in range(2)]


@cases("passages, user, action, rewards")
def test_passages_come_with_the_question_and_ground_its_answer(
    question: Question, passages: str, user: str | None, action: str, rewards: list[int]
) -> None:
    shown = {"one": PASSAGES[:1], "twice": TWICE}.get(passages, [])
    env = AnswerEnv(question, shown, system=FROM_PASSAGES if shown else CLOSED_BOOK)
    assert (env.system, env.tools) == (FROM_PASSAGES if shown else "Answer the question.", ())
    assert user is None or env.user == user + question.text
    transition = act(env, action)
    assert transition.outcome is Outcome.ANSWERED
    assert transition.rewards == dict(zip(("em", "f1", "grounded", "progress", "think"), rewards, strict=True))
    for other, status in (("Tesk", CallStatus.MALFORMED), (call("search"), CallStatus.UNKNOWN_TOOL)):
        ended = act(AnswerEnv(question, shown), other)
        assert (ended.outcome, ended.call_status, ended.answer) == (Outcome.MALFORMED, status, "")
        assert ended.rewards == {"think": 0.0, "progress": rewards[3]}


@pytest.mark.parametrize("instructions", ["", " Be brief."])
def test_every_protocol_gives_the_configured_instructions(question: Question, index: Search, instructions: str) -> None:
    limits, questions = PARAMS.model_copy(update={"instructions": instructions.strip()}), [question]
    gold = {question.question_id: [Passage(passage_id="p", title="t", text="x")]}
    shared = Shared(limits, Cached(index, "", 0))
    searching = "Answer the question. Search when facts are missing."
    for [attempt], system in (
        (attempts_at(questions, shared), searching),
        ([asked_attempt("Who?", shared)], searching),
        (naive_rag_attempts(questions, shared), "Answer the question from the passages."),
        (closed_book_attempts(questions, shared), "Answer the question."),
        (gold_passages_attempts(questions, gold, shared), "Answer the question from the passages."),
    ):
        assert attempt.env(0).system == system + instructions


def test_a_question_of_an_environment_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="question 'a': there is no env 'qaa'; did you mean 'qa'"):
        require_playable([Question(question_id="a", dataset="d", split="test", text="?", env="qaa", strata={})], PARAMS)
