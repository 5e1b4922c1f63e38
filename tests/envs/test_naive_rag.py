from __future__ import annotations

from agent_r1.envs.naive_rag import NaiveRagEnv
from agent_r1.records import CallStatus, Outcome, Question
from agent_r1.search.base import Search


def test_passages_come_with_the_question(question: Question, index: Search) -> None:
    env = NaiveRagEnv(question, index, top_k=2)
    assert env.user == f"Low Tide: Low Tide is a film by Mara Quill.\n\n{question.text}"
    assert env.tools == []
    transition = env.step("<answer>the Tesk</answer>")
    assert transition.outcome is Outcome.ANSWERED
    # One of two gold passages was shown, and it does not hold the answer.
    assert transition.rewards == {"em": 1.0, "f1": 1.0, "grounded": 0.0, "progress": 1.0, "think": 0.0}


def test_an_answer_may_be_grounded_in_the_passages_of_the_prompt(question: Question, index: Search) -> None:
    transition = NaiveRagEnv(question, index, top_k=2).step("<think>Who?</think><answer>Mara Quill</answer>")
    assert (transition.rewards["grounded"], transition.rewards["think"]) == (1.0, 1.0)


def test_anything_but_an_answer_is_malformed(question: Question, index: Search) -> None:
    transition = NaiveRagEnv(question, index, top_k=2).step("Tesk")
    assert (transition.outcome, transition.call_status) == (Outcome.MALFORMED, CallStatus.MALFORMED)
    assert transition.rewards == {"think": 0.0, "progress": 1.0}
    call = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    transition = NaiveRagEnv(question, index, top_k=2).step(call)
    assert (transition.outcome, transition.call_status) == (Outcome.MALFORMED, CallStatus.UNKNOWN_TOOL)
    assert transition.answer == ""
