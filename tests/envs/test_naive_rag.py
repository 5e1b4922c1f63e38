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
    assert transition.rewards == {"em": 1.0, "f1": 1.0, "progress": 1.0}  # one of two gold passages was shown


def test_anything_but_an_answer_is_malformed(question: Question, index: Search) -> None:
    transition = NaiveRagEnv(question, index, top_k=2).step("Tesk")
    assert (transition.outcome, transition.call_status) == (Outcome.MALFORMED, CallStatus.MALFORMED)
    call = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    transition = NaiveRagEnv(question, index, top_k=2).step(call)
    assert (transition.outcome, transition.call_status) == (Outcome.MALFORMED, CallStatus.UNKNOWN_TOOL)
    assert transition.answer == ""
