from __future__ import annotations

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
from agent_r1.tools.base import FunctionTool, ToolError, ToolResult
from agent_r1.tools.search import search_tool

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
    first = act(env, f"<think>The director.</think>{call('search', query='Low Tide')}")
    assert first.observations == ("Low Tide: Low Tide is a film by Mara Quill.",)
    [made] = first.calls
    assert (made.tool, made.arguments, made.status) == ("search", '{"query": "Low Tide"}', CallStatus.OK)
    assert (first.rewards, first.rewards_when_read) == ({"think": 1.0}, {"progress": 1.0})
    second = act(env, call("search", query="Mara Quill Low Tide"))
    assert (second.rewards, second.rewards_when_read) == ({"think": 0.0}, {"progress": 1.0})
    last = act(env, "<answer>in Tesk</answer>")
    assert last.outcome is Outcome.ANSWERED
    assert last.observations == ()
    assert last.answer == "in Tesk"
    # F1: precision 1/2, recall 1. "Mara Quill was born in Tesk" holds the answer's words in a row.
    assert last.rewards == {"em": 0.0, "f1": pytest.approx(2 / 3), "grounded": 1.0, "think": 0.0}
    assert last.call_status is CallStatus.NONE


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


def test_a_search_that_finds_nothing_is_a_good_call(env: ToolEnv) -> None:
    transition = act(env, call("search", query="zzz"))
    assert transition.observations == ("nothing found",)
    assert transition.call_status is CallStatus.OK
    assert transition.rewards_when_read == {"progress": 0.0}


@pytest.mark.parametrize(
    ("fault", "status"), [(WorldFault("down"), CallStatus.FAILED), (WorldTimeout("slow"), CallStatus.TIMEOUT)]
)
def test_a_fault_of_the_world_ends_the_episode_and_earns_nothing(
    question: Question, fault: WorldFault, status: CallStatus
) -> None:
    class Down(Search):
        def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            raise fault

    env = ToolEnv(question, [search_tool(Down(), top_k=2)], max_steps=3)
    ended = act(env, f"<think>Look.</think>{call('search', query='Low Tide')}")
    assert (ended.outcome, ended.fault, ended.call_status) == (Outcome.ABORTED, str(fault), status)
    assert [(made.tool, made.arguments) for made in ended.calls] == [("search", '{"query": "Low Tide"}')]
    assert (ended.observations, ended.rewards, ended.rewards_when_read) == ((), {}, {})


@pytest.mark.parametrize(
    ("action", "think"),
    [
        (f"<think>First the film.</think>{call('search', query='Low Tide')}", 1.0),
        (f"<think>One more.</think>{call('seek', query='x')}", 1.0),  # well formed, though there is no such tool
        ("<think>I know.</think><answer>Tesk</answer>", 1.0),
        (f"<think> </think>{call('search', query='Low Tide')}", 0.0),  # says nothing
        (call("search", query="Low Tide"), 0.0),
        (f"{call('search', query='Low Tide')}<think>Afterwards.</think>", 0.0),
        ("<think>Only a thought.</think>", 0.0),
        ("<think>One.</think><think>Two.</think><answer>Tesk</answer>", 0.0),
        ("<think>Open. <answer>Tesk</answer>", 0.0),
    ],
)
def test_think_is_a_thought_before_a_well_formed_action(env: ToolEnv, action: str, think: float) -> None:
    assert act(env, action).rewards["think"] == think


@pytest.mark.parametrize(
    ("before", "answer", "grounded"),
    [
        ([call("search", query="Low Tide")], "the MARA quill!", 1.0),  # normalised, right or wrong
        ([call("search", query="Low Tide")], "Tesk", 0.0),  # right, and nowhere to be seen
        ([call("search", query="Mara Quill"), call("search", query="zzz")], "Tesk", 1.0),  # in an earlier one
        ([call("search", query="Low Tide")], "Tide Mara", 0.0),  # both words, not in a row
        ([call("search", query="Low Tide")], "Qu", 0.0),  # half a word
        ([call("search", query="Low Tide")], "the", 0.0),  # nothing is left of it
        ([call("search", query="Low Tide")], "", 0.0),
        ([call("Tesk")], "Tesk", 0.0),  # "there is no tool 'Tesk'": the policy's own word
        ([], "Low Tide", 0.0),  # in the question only
    ],
)
def test_an_answer_is_grounded_in_what_calls_have_shown(
    env: ToolEnv, before: list[str], answer: str, grounded: float
) -> None:
    for action in before:
        assert act(env, action).observations
    assert act(env, f"<answer>{answer}</answer>").rewards["grounded"] == grounded


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
    transition = act(env, action)
    assert transition.call_status is status
    [said] = transition.observations
    assert said.startswith("Error: ")
    assert told in said
    assert (transition.rewards, transition.rewards_when_read) == ({"think": 0.0}, {})
    assert act(env, "<answer>Tesk</answer>").rewards == {"em": 1.0, "f1": 1.0, "grounded": 0.0, "think": 0.0}


@pytest.mark.parametrize(
    ("last", "outcome"),
    [(call("search", query="Low Tide"), Outcome.TURN_LIMIT), ("Tesk", Outcome.MALFORMED)],
)
def test_out_of_steps(env: ToolEnv, last: str, outcome: Outcome) -> None:
    for _ in range(2):
        assert act(env, call("seek")).outcome is None
    transition = act(env, last)
    assert transition.outcome is outcome
    assert transition.observations == ()
    assert transition.answer == ""
    with pytest.raises(RuntimeError, match="over"):
        act(env, last)


def test_what_the_last_call_finds_is_not_seen(question: Question, index: Search) -> None:
    """That it was a good call is a fact; its result would be read by nobody."""
    env = ToolEnv(question, [search_tool(index, top_k=2)], max_steps=1)
    transition = act(env, call("search", query="Low Tide"))
    assert (transition.call_status, transition.outcome) == (CallStatus.OK, Outcome.TURN_LIMIT)
    assert (transition.rewards, transition.rewards_when_read) == ({"think": 0.0}, {})


def test_equal_arguments_read_equal(question: Question) -> None:
    def add(a: int, b: int) -> ToolResult:
        """Adds."""
        return ToolResult(text=str(a + b))

    env = ToolEnv(question, [FunctionTool(add)], max_steps=2)
    [one], [other] = (act(env, action).calls for action in (call("add", b=2, a=1), call("add", a=1, b=2)))
    assert one.arguments == other.arguments


def test_bugs_of_a_tool_are_raised(question: Question) -> None:
    def broken() -> ToolResult:
        """Breaks."""
        raise KeyError("ours")

    def refusing() -> ToolResult:
        """Refuses."""
        raise ToolError("theirs")

    env = ToolEnv(question, [FunctionTool(broken), FunctionTool(refusing)], max_steps=2)
    assert act(env, call("refusing")).observations == ("Error: theirs",)
    with pytest.raises(KeyError):
        act(env, call("broken"))


def found(question: Question, index: Search) -> list[Passage]:
    [passages] = index.search([question.text], 2)
    return passages


def test_passages_come_with_the_question(question: Question, index: Search) -> None:
    env = AnswerEnv(question, found(question, index))
    assert env.user == f"Low Tide: Low Tide is a film by Mara Quill.\n\n{question.text}"
    assert (env.system, env.tools) == (FROM_PASSAGES, ())
    transition = act(env, "<answer>the Tesk</answer>")
    assert transition.outcome is Outcome.ANSWERED
    # One of two gold passages was shown, and it does not hold the answer.
    assert transition.rewards == {"em": 1.0, "f1": 1.0, "grounded": 0.0, "progress": 1.0, "think": 0.0}


def test_an_answer_may_be_grounded_in_the_passages_of_the_prompt(question: Question, index: Search) -> None:
    transition = act(AnswerEnv(question, found(question, index)), "<think>Who?</think><answer>Mara Quill</answer>")
    assert (transition.rewards["grounded"], transition.rewards["think"]) == (1.0, 1.0)


def test_a_closed_book_is_the_question_alone_and_grounds_nothing(question: Question) -> None:
    env = AnswerEnv(question, [], system=CLOSED_BOOK)
    assert (env.system, env.user, env.tools) == ("Answer the question.", question.text, ())
    transition = act(env, "<answer>Tesk</answer>")
    assert transition.rewards == {"em": 1.0, "f1": 1.0, "grounded": 0.0, "progress": 0.0, "think": 0.0}


def test_two_passages_of_one_title_are_one_gold_passage(question: Question) -> None:
    twice = [Passage(passage_id=str(i), title="Mara Quill", text=f"Part {i}.") for i in range(2)]
    env = AnswerEnv(question, twice)
    assert env.user == f"Mara Quill: Part 0.\nMara Quill: Part 1.\n\n{question.text}"
    assert act(env, "<answer>Tesk</answer>").rewards["progress"] == 1.0


def test_anything_but_an_answer_is_malformed(question: Question, index: Search) -> None:
    transition = act(AnswerEnv(question, found(question, index)), "Tesk")
    assert (transition.outcome, transition.call_status) == (Outcome.MALFORMED, CallStatus.MALFORMED)
    assert transition.rewards == {"think": 0.0, "progress": 1.0}
    call = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    transition = act(AnswerEnv(question, found(question, index)), call)
    assert (transition.outcome, transition.call_status) == (Outcome.MALFORMED, CallStatus.UNKNOWN_TOOL)
    assert transition.answer == ""


@pytest.mark.parametrize("instructions", ["", "Be brief."])
def test_every_protocol_gives_the_configured_instructions(question: Question, index: Search, instructions: str) -> None:
    limits, questions = PARAMS.model_copy(update={"instructions": instructions}), [question]
    gold = {question.question_id: [Passage(passage_id="p", title="t", text="x")]}
    shared = Shared(limits, Cached(index, "", 0))
    attempts = [
        *attempts_at(questions, shared),
        asked_attempt("Who?", shared),
        *naive_rag_attempts(questions, shared),
        *closed_book_attempts(questions, shared),
        *gold_passages_attempts(questions, gold, shared),
    ]
    added = f" {instructions}" if instructions else ""
    assert [attempt.env(0).system for attempt in attempts] == [
        "Answer the question. Search when facts are missing." + added,
        "Answer the question. Search when facts are missing." + added,
        "Answer the question from the passages." + added,
        "Answer the question." + added,
        "Answer the question from the passages." + added,
    ]


def test_a_question_of_an_environment_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="question 'a': there is no env 'qaa'; did you mean 'qa'"):
        require_playable([Question(question_id="a", dataset="d", split="test", text="?", env="qaa", strata={})], PARAMS)
