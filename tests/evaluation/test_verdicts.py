"""Two evaluations of one policy on hand-made questions, and the gate on constructed predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from agent_r1.evaluation.comparison import Evaluation, same_setting
from agent_r1.evaluation.verdicts import Decision, Drift, decide, decision_table, drift, explain
from agent_r1.params.stages import EvaluateParams, PromoteParams
from agent_r1.records import Prediction, Question


@pytest.fixture
def questions(make_question: Any) -> list[Question]:
    return [make_question(f"q{i}") for i in range(20)]


@pytest.fixture
def answered(questions: list[Question], make_evaluation: Any) -> Any:
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


def test_the_same_answers_are_no_drift(answered: Any, drifted: Any, questions: list[Question]) -> None:
    found = drifted(answered("now", {3: "Veld"}), answered("before", {3: "Veld"}), questions)
    assert (found.changed, found.beyond) == ([], [])
    assert explain(found) == "now answers every question as before did"


def test_one_changed_answer_is_named_and_within_chance(answered: Any, drifted: Any, questions: list[Question]) -> None:
    found = drifted(answered("now", {3: "Veld"}), answered("before", {}), questions)
    assert (changed(found), found.beyond) == (["q3"], [])
    assert found.differences["atlas"].mean == pytest.approx(-1 / 20)
    said = explain(found).splitlines()
    assert said[0].startswith("now answers 1 question differently from before, within chance; exact match now less")
    assert said[1] == "  q3: 'Tesk' -> 'Veld', success 1 -> 0"


def test_an_answer_as_wrong_as_before_has_changed_too(answered: Any, drifted: Any, questions: list[Question]) -> None:
    found = drifted(answered("now", {3: "Veld"}), answered("before", {3: ""}), questions)
    assert changed(found) == ["q3"]
    assert "  q3: '(none)' -> 'Veld', success 0 -> 0" in explain(found)


def test_many_changed_answers_are_beyond_chance(answered: Any, drifted: Any, questions: list[Question]) -> None:
    """Ten of twenty turn wrong: -.5, with a standard error of sqrt(.25 / 20) = .11."""
    found = drifted(answered("now", dict.fromkeys(range(10), "Veld")), answered("before", {}), questions)
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
    answered: Any, drifted: Any, questions: list[Question]
) -> None:
    before = answered("before", {})
    other_policy, other_index = answered("now", {}, policy="v"), answered("now", {}, index="j")
    assert same_setting(answered("now", {3: "Veld"}), before)
    assert not same_setting(other_policy, before)
    assert not same_setting(other_index, before)
    with pytest.raises(ValueError, match="now and before are of two policies: that is no drift; compare them"):
        drifted(other_policy, before, questions)
    with pytest.raises(ValueError, match="not measured alike: they differ in index"):
        drifted(other_index, before, questions)


def test_what_the_world_cut_short_decides_nothing(
    make_evaluation: Any, drifted: Any, questions: list[Question], draws: EvaluateParams
) -> None:
    """Right on 19 of 19, with one episode aborted, against 10 of 20."""
    challenger = make_evaluation("new", questions, [*["Tesk"] * 19, None])
    champion = make_evaluation("old", questions, ["Tesk", "Veld"] * 10)
    gate = PromoteParams(margin=0.0, level=0.95)
    refused = decide(challenger, champion, gate, draws)
    assert (refused.promoted, refused.questions) == (False, 0)
    assert refused.reason.startswith("the world cut episodes short, new (aborted: 1 of 20)")
    anyway = decide(challenger, champion, gate, draws, anyway=True)
    assert (anyway.promoted, anyway.questions, anyway.challenger_success) == (True, 19, 1.0)
    before = make_evaluation("before", questions, ["Tesk"] * 20, policy="new")
    with pytest.raises(ValueError, match=r"aborted: 1 of 20"):
        drifted(challenger, before, questions)


HASHES = {"questions": "q", "passages": "p", "index": "i", "prompt": "t", "protocol": "tool_call", "limits": "l"}

DRAWS = EvaluateParams(seed=0, questions=0, bootstrap_samples=2000, history_kept=14)


def evaluation(name: str, right: Sequence[float] | np.ndarray, **hashes: str) -> Evaluation:
    """Success by question."""
    predictions = [
        Prediction(
            run=name,
            seed=0,
            policy_version=1,
            question_id=f"q{i}",
            answer="Tesk",
            success=float(one),
            facts={},
            steps=2,
            tool_calls=1,
            tokens_read=10,
            tokens_sampled=10,
        )
        for i, one in enumerate(right)
    ]
    return Evaluation(name=name, predictions=predictions, trajectories=[], hashes={**HASHES, "policy": name, **hashes})


def decided(challenger: Evaluation, champion: Evaluation, margin: float = 0.0, level: float = 0.95) -> Decision:
    return decide(challenger, champion, PromoteParams(margin=margin, level=level), DRAWS)


def test_ten_points_over_300_questions_are_promoted() -> None:
    """Of 300, 150 right in both, 45 in the challenger alone, 15 in the champion alone: 195 - 165 = 30, ten points."""
    challenger = evaluation("challenger", [1] * 150 + [1] * 45 + [0] * 15 + [0] * 90)
    champion = evaluation("champion", [1] * 150 + [0] * 45 + [1] * 15 + [0] * 90)
    found = decided(challenger, champion)
    assert found.promoted
    assert (found.questions, found.only_challenger_right, found.only_champion_right) == (300, 45, 15)
    assert (found.challenger_success, found.champion_success) == (0.65, 0.55)
    assert found.difference
    assert found.difference.mean == pytest.approx(0.1)
    # The normal interval: the variance of a difference is 60/300 - .1^2 = .19, so +- 1.96 sqrt(.19/300) = .0493.
    assert (found.difference.low, found.difference.high) == pytest.approx((0.0507, 0.1493), abs=0.005)
    assert found.reason == f"the lower bound {found.difference.low:+.3f} of the difference is above the margin +0.000"


def test_a_true_gain_of_ten_points_is_promoted_nearly_always() -> None:
    """Draws of 300 questions from agents that are right on 60 % and 70 % of all, with their luck in common."""
    rng = np.random.default_rng(0)
    luck = rng.random((100, 300))
    promoted = [decided(evaluation("a", row < 0.7), evaluation("b", row < 0.6)).promoted for row in luck]
    assert sum(promoted) == 100


def test_equal_models_are_refused_at_least_95_times_in_100() -> None:
    """Two agents that are right on 60 % of all questions, independently of each other."""
    rng = np.random.default_rng(0)
    draws = rng.random((100, 2, 300)) < 0.6
    refused = [not decided(evaluation("a", a), evaluation("b", b)).promoted for a, b in draws]
    assert sum(refused) >= 95


def test_two_points_on_100_questions_are_refused() -> None:
    """Two gained and none lost: the most that two points can say. P(no gain in a resample) = .98^100 = .13."""
    found = decided(evaluation("challenger", [1] * 62 + [0] * 38), evaluation("champion", [1] * 60 + [0] * 40))
    assert not found.promoted
    assert found.difference
    assert (found.difference.mean, found.difference.low) == (pytest.approx(0.02), 0.0)
    assert found.reason == "the lower bound +0.000 of the difference is not above the margin +0.000"


@pytest.mark.parametrize(
    ("gained", "lost", "luck", "promoted"),
    [
        (4, 0, 1 / 16, False),
        (5, 0, 1 / 32, False),
        (6, 0, 1 / 64, True),
        (7, 1, 9 / 256, False),  # C(8,7) + C(8,8)
        (9, 1, 11 / 1024, True),  # C(10,9) + C(10,10)
        (0, 4, 1.0, False),
    ],
)
def test_few_questions_that_one_alone_answers_right_must_not_be_luck(
    gained: int, lost: int, luck: float, promoted: bool
) -> None:
    """Of 100 questions; the chance that as many coins or more show heads is at most .025."""
    alike = [1] * 50 + [0] * (50 - gained - lost)
    challenger = evaluation("challenger", [*alike, *[1] * gained, *[0] * lost])
    found = decided(challenger, evaluation("champion", [*alike, *[0] * gained, *[1] * lost]))
    assert (found.luck, found.promoted) == (pytest.approx(luck), promoted)
    assert found.most_luck == pytest.approx(0.025)


def test_the_reason_and_the_table_tell_luck() -> None:
    found = decided(evaluation("a", [1] * 54 + [0] * 46), evaluation("b", [1] * 50 + [0] * 50))
    assert found.difference
    assert found.reason == (
        f"the lower bound {found.difference.low:+.3f} of the difference is above the margin +0.000, but an equal one "
        "gains as much with a chance of 0.0625, above 0.0250"
    )
    assert "| chance of an equal one (sign test) | 0.0625, at most 0.0250 passes |" in decision_table(found)


def test_the_lower_bound_must_be_above_the_margin() -> None:
    """Every question gained on half of 200: the bound is near .43, above .4 and not above .45."""
    challenger, champion = evaluation("challenger", [1] * 200), evaluation("champion", [0, 1] * 100)
    assert decided(challenger, champion, margin=0.4).promoted
    assert not decided(challenger, champion, margin=0.45).promoted


def test_a_higher_level_asks_for_more() -> None:
    challenger, champion = evaluation("challenger", [1] * 66 + [0] * 34), evaluation("champion", [1] * 60 + [0] * 40)
    levels = {level: decided(challenger, champion, level=level).promoted for level in (0.95, 0.999)}
    assert levels == {0.95: True, 0.999: False}


def test_pairs_are_by_question_whatever_the_order() -> None:
    a, b = evaluation("a", [1, 1, 0, 0] * 25), evaluation("b", [1, 1, 0, 0] * 25)
    turned = dataclasses.replace(b, predictions=b.predictions[::-1])
    found = decided(a, turned)
    assert (found.only_challenger_right, found.only_champion_right) == (0, 0)


def test_predictions_of_other_questions_are_refused() -> None:
    challenger = evaluation("challenger", [1] * 300)
    found = decided(challenger, evaluation("champion", [0] * 299))
    assert (found.promoted, found.difference, found.questions) == (False, None, 0)
    assert found.reason == (
        "they were not measured alike, they differ in questions asked; evaluate both under one configuration"
    )


@pytest.mark.parametrize("what", ["questions", "protocol"])
def test_evaluations_of_other_data_index_or_prompt_are_refused(what: str) -> None:
    found = decided(evaluation("challenger", [1] * 300, **{what: "other"}), evaluation("champion", [0] * 300))
    assert not found.promoted
    assert f"they differ in {what}; evaluate both" in found.reason


def test_evaluations_whose_limits_nobody_wrote_down_are_refused() -> None:
    unknown = {name: value for name, value in HASHES.items() if name != "limits"}
    challenger, champion = (
        dataclasses.replace(evaluation(name, right), hashes={**unknown, "policy": name})
        for name, right in (("challenger", [1] * 300), ("champion", [0] * 300))
    )
    assert "they differ in limits; evaluate both" in decided(challenger, champion).reason
    known = evaluation("champion", [0] * 300)
    assert "they differ in limits; evaluate both" in decided(challenger, known).reason


def test_the_table_shows_the_numbers_or_why_there_are_none() -> None:
    challenger = evaluation("challenger", [1] * 66 + [0] * 34)
    page = decision_table(decided(challenger, evaluation("champion", [1] * 60 + [0] * 40)))
    assert page.startswith("challenger is promoted against champion: the lower bound")
    assert "| success of challenger | 0.660 |" in page
    assert "| right in champion alone | 0 |" in page
    assert "| its 95% interval | +0.020 to +0.110 |" in page
    refused = decision_table(decided(challenger, evaluation("champion", [1])))
    assert refused.startswith("challenger is refused against champion: they were not measured alike")
    assert "|" not in refused
