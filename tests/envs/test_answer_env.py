from __future__ import annotations

from agent_r1.envs.tool_env import CLOSED_BOOK, FROM_PASSAGES, AnswerEnv
from agent_r1.records import CallStatus, Outcome, Passage, Question
from agent_r1.search.base import Search


def found(question: Question, index: Search) -> list[Passage]:
    [passages] = index.search([question.text], 2)
    return passages


def test_passages_come_with_the_question(question: Question, index: Search) -> None:
    env = AnswerEnv(question, found(question, index))
    assert env.user == f"Low Tide: Low Tide is a film by Mara Quill.\n\n{question.text}"
    assert (env.system, env.tools) == (FROM_PASSAGES, [])
    transition = env.step("<answer>the Tesk</answer>")
    assert transition.outcome is Outcome.ANSWERED
    # One of two gold passages was shown, and it does not hold the answer.
    assert transition.rewards == {"em": 1.0, "f1": 1.0, "grounded": 0.0, "progress": 1.0, "think": 0.0}


def test_an_answer_may_be_grounded_in_the_passages_of_the_prompt(question: Question, index: Search) -> None:
    transition = AnswerEnv(question, found(question, index)).step("<think>Who?</think><answer>Mara Quill</answer>")
    assert (transition.rewards["grounded"], transition.rewards["think"]) == (1.0, 1.0)


def test_a_closed_book_is_the_question_alone_and_grounds_nothing(question: Question) -> None:
    env = AnswerEnv(question, [], system=CLOSED_BOOK)
    assert (env.system, env.user, env.tools) == ("Answer the question.", question.text, [])
    transition = env.step("<answer>Tesk</answer>")
    assert transition.rewards == {"em": 1.0, "f1": 1.0, "grounded": 0.0, "progress": 0.0, "think": 0.0}


def test_two_passages_of_one_title_are_one_gold_passage(question: Question) -> None:
    twice = [Passage(passage_id=str(i), title="Mara Quill", text=f"Part {i}.") for i in range(2)]
    env = AnswerEnv(question, twice)
    assert env.user == f"Mara Quill: Part 0.\nMara Quill: Part 1.\n\n{question.text}"
    assert env.step("<answer>Tesk</answer>").rewards["progress"] == 1.0


def test_anything_but_an_answer_is_malformed(question: Question, index: Search) -> None:
    transition = AnswerEnv(question, found(question, index)).step("Tesk")
    assert (transition.outcome, transition.call_status) == (Outcome.MALFORMED, CallStatus.MALFORMED)
    assert transition.rewards == {"think": 0.0, "progress": 1.0}
    call = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    transition = AnswerEnv(question, found(question, index)).step(call)
    assert (transition.outcome, transition.call_status) == (Outcome.MALFORMED, CallStatus.UNKNOWN_TOOL)
    assert transition.answer == ""
