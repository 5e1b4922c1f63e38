"""Two evaluations of one policy on hand-made questions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from agent_r1.evaluation.comparison import Evaluation
from agent_r1.evaluation.verdicts import Drift, drift, explain, same_setting
from agent_r1.params import EvaluateParams
from agent_r1.records import Question


@pytest.fixture
def questions(make_question: Any) -> list[Question]:
    return [make_question(f"q{i}") for i in range(20)]


@pytest.fixture
def evaluation(questions: list[Question], make_evaluation: Any) -> Any:
    """An evaluation of the policy w by its name and the answers that are not the right one, by question."""

    def make(name: str, answers: dict[int, str], **hashes: str) -> Evaluation:
        told = [answers.get(i, "Tesk") for i in range(len(questions))]
        return make_evaluation(name, questions, told, **{"policy": "w", **hashes})

    return make


@pytest.fixture
def drifted(draws: EvaluateParams) -> Callable[..., Drift]:
    return lambda current, previous, questions: drift(current, previous, questions, draws)


def changed(found: Drift) -> list[str]:
    return [pair.question.question_id for pair in found.changed]


def test_the_same_answers_are_no_drift(evaluation: Any, drifted: Any, questions: list[Question]) -> None:
    found = drifted(evaluation("now", {3: "Veld"}), evaluation("before", {3: "Veld"}), questions)
    assert (found.changed, found.beyond) == ([], [])
    assert explain(found) == "now answers every question as before did"


def test_one_changed_answer_is_named_and_within_chance(
    evaluation: Any, drifted: Any, questions: list[Question]
) -> None:
    found = drifted(evaluation("now", {3: "Veld"}), evaluation("before", {}), questions)
    assert (changed(found), found.beyond) == (["q3"], [])
    assert found.differences["atlas"].mean == pytest.approx(-1 / 20)
    said = explain(found).splitlines()
    assert said[0].startswith("now answers 1 question differently from before, within chance; exact match now less")
    assert said[1] == "  q3: 'Tesk' -> 'Veld', em 1 -> 0"


def test_an_answer_as_wrong_as_before_has_changed_too(evaluation: Any, drifted: Any, questions: list[Question]) -> None:
    found = drifted(evaluation("now", {3: "Veld"}), evaluation("before", {3: ""}), questions)
    assert changed(found) == ["q3"]
    assert "  q3: '(none)' -> 'Veld', em 0 -> 0" in explain(found)


def test_many_changed_answers_are_beyond_chance(evaluation: Any, drifted: Any, questions: list[Question]) -> None:
    """Ten of twenty turn wrong: -.5, with a standard error of sqrt(.25 / 20) = .11."""
    found = drifted(evaluation("now", dict.fromkeys(range(10), "Veld")), evaluation("before", {}), questions)
    assert found.beyond == ["atlas"]
    said = explain(found, shown=4)
    assert "10 questions differently from before, beyond chance on atlas; exact match now less before: atlas -0" in said
    assert said.splitlines()[-1] == "  and 6 more"
    assert len(explain(found).splitlines()) == 11


def test_a_drift_on_one_data_set_is_not_drowned_in_another(
    make_question: Any, make_evaluation: Any, drifted: Any
) -> None:
    """All four questions of `small` turn wrong among 400 of `large`: a hundredth of all, and everything of `small`."""
    large = [make_question(f"l{i}") for i in range(400)]
    small = [dataclasses.replace(make_question(f"s{i}"), dataset="small") for i in range(4)]
    asked = large + small

    def of(name: str, wrong: list[Question]) -> Evaluation:
        answers = ["Veld" if question in wrong else "Tesk" for question in asked]
        return make_evaluation(name, asked, answers, calls=0, policy="w")

    found = drifted(of("now", small), of("before", []), asked)
    assert found.beyond == ["small"]
    assert found.differences["atlas"].mean == 0.0


def test_only_evaluations_of_one_policy_that_were_measured_alike(
    evaluation: Any, drifted: Any, questions: list[Question]
) -> None:
    before = evaluation("before", {})
    other_policy, other_index = evaluation("now", {}, policy="v"), evaluation("now", {}, index="j")
    assert same_setting(evaluation("now", {3: "Veld"}), before)
    assert not same_setting(other_policy, before)
    assert not same_setting(other_index, before)
    with pytest.raises(ValueError, match="now and before are of two policies: that is no drift; compare them"):
        drifted(other_policy, before, questions)
    with pytest.raises(ValueError, match="not measured alike: they differ in index"):
        drifted(other_index, before, questions)
