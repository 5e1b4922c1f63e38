"""Two evaluations of four hand-made questions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from agent_r1.evaluation.comparison import Comparison, Evaluation, compare
from agent_r1.params.stages import EvaluateParams
from agent_r1.records import Question


@pytest.fixture
def questions(make_question: Any) -> list[Question]:
    return [make_question(f"q{i}") for i in range(4)]


@pytest.fixture
def evaluation(questions: list[Question], make_evaluation: Any) -> Any:
    def make(name: str, right: list[int], calls: int, **hashes: str) -> Evaluation:
        answers = ["Tesk" if i in right else "Veld" for i in range(len(questions))]
        return make_evaluation(name, questions, answers, calls, **hashes)

    return make


@pytest.fixture
def compared(draws: EvaluateParams) -> Callable[..., Comparison]:
    return lambda a, b, questions, anyway=False: compare(a, b, questions, draws, anyway=anyway)


def ids(pairs: Any) -> list[str]:
    return [pair.question.question_id for pair in pairs]


def test_means_and_differences_by_hand(evaluation: Any, compared: Any, questions: list[Question]) -> None:
    found = compared(evaluation("a", [0, 1, 2], 1), evaluation("b", [2, 3], 3), questions)
    rows = {row.measure: row for row in found.measured}
    # Right on 3 and 2 of 4 questions; one call against three on every question.
    assert (rows["em"].a.mean, rows["em"].b.mean, rows["em"].difference.mean) == (0.75, 0.5, 0.25)
    calls = rows["tool_calls"].difference
    assert (calls.mean, calls.low, calls.high, calls.excludes_zero) == (-2.0, -2.0, -2.0, True)
    assert rows["em"].difference.low <= 0.25 <= rows["em"].difference.high
    assert rows["tokens_read"].difference.mean < 0
    assert (ids(found.only_a_right), ids(found.only_b_right)) == (["q0", "q1"], ["q3"])
    assert (len(found.pairs), found.differing) == (4, [])


def test_pairs_are_by_question_whatever_the_order(evaluation: Any, compared: Any, questions: list[Question]) -> None:
    a, b = evaluation("a", [0, 1, 2], 1), evaluation("b", [0, 1, 2], 1)
    turned = dataclasses.replace(b, predictions=b.predictions[::-1])
    rows = {row.measure: row for row in compared(a, turned, questions).measured}
    found = rows["em"].difference
    # Four equal answers: of all questions 1 - .025^(1/4) = .602 may differ.
    assert (found.mean, found.low, found.high) == (0.0, pytest.approx(-0.602, abs=1e-3), pytest.approx(0.602, abs=1e-3))


def test_settings_that_differ_are_named_and_refused(evaluation: Any, compared: Any, questions: list[Question]) -> None:
    a, b = evaluation("a", [0, 1], 1), evaluation("b", [1, 2], 1)
    other = evaluation("b", [0], 1, prompt="other", index="other")
    fewer, nothing = (dataclasses.replace(b, predictions=b.predictions[count:]) for count in (1, 4))
    for given, differing in ((other, ["index", "prompt"]), (fewer, ["questions asked"])):
        message = f"a and b were not measured alike: they differ in {', '.join(differing)}; evaluate"
        with pytest.raises(ValueError, match=message):
            compared(a, given, questions)
        assert compared(a, given, questions, anyway=True).differing == differing
    found = compared(a, fewer, questions, anyway=True)
    assert ids(found.pairs) == ["q1", "q2", "q3"], "those in common"
    assert {row.measure: row.a.mean for row in found.measured}["em"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="a and b have no question in common"):
        compared(a, nothing, questions, anyway=True)
    with pytest.raises(ValueError, match="question 'q3' of a is not prepared"):
        compared(a, b, questions[:3], anyway=True)


def test_measure_of_no_question_is_left_out(make_evaluation: Any, compared: Any, questions: list[Question]) -> None:
    def measures(asked: list[Question]) -> set[str]:
        a, b = (make_evaluation(name, asked, [answer] * 4) for name, answer in (("a", "Tesk"), ("b", "Veld")))
        return {row.measure for row in compared(a, b, asked).measured}

    ungrounded = [dataclasses.replace(question, gold_titles=[]) for question in questions]
    assert "gold_recall" not in measures(ungrounded)
    assert "gold_recall" in measures([*ungrounded[:3], questions[3]])
