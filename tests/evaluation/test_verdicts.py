"""Two evaluations of one policy on hand-made questions, and the gate on constructed predictions."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from agent_r1.evaluation.comparison import Evaluation, same_setting
from agent_r1.evaluation.verdicts import Decision, Drift, decide, decision_table, drift, explain, verdict
from agent_r1.params.stages import EvaluateParams, PromoteParams
from agent_r1.records import GREEDY, Prediction, Question
from tests.cases import cases

HASHES = {"questions": "q", "passages": "p", "index": "i", "prompt": "t", "protocol": "tool_call", "limits": "l"}
DRAWS = EvaluateParams(seed=0, questions=0, bootstrap_samples=2000, history_kept=14)


@pytest.fixture
def questions(make_question: Any) -> list[Question]:
    return [make_question(f"q{i}") for i in range(20)]


@pytest.fixture
def answered(questions: list[Question], make_evaluation: Any) -> Any:
    def make(name: str, answers: dict[int, str], **hashes: str) -> Evaluation:
        told = [answers.get(i, "Tesk") for i in range(len(questions))]
        return make_evaluation(name, questions, told, **{"policy": "w", **hashes})

    return make


@pytest.fixture
def drifted(draws: EvaluateParams, questions: list[Question]) -> Callable[..., Drift]:
    return lambda current, previous, asked=questions: drift(current, previous, asked, draws)


@cases("now, before, changed, beyond, said")
def test_changed_answers_are_named_and_weighed(
    answered: Any, drifted: Any, now: Any, before: Any, changed: list[str], beyond: list[str], said: list[str]
) -> None:
    found = drifted(answered("now", now), answered("before", before))
    assert ([pair.question.question_id for pair in found.changed], found.beyond) == (changed, beyond)
    assert found.differences["atlas"].mean == pytest.approx((len(before) - len(now)) / 20)
    lines = explain(found).splitlines()
    assert len(lines) == 1 + len(changed)
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=False))
    if len(changed) > 4:
        assert explain(found, shown=4).splitlines()[-1] == f"  and {len(changed) - 4} more"


def test_drift_of_one_data_set_is_not_drowned(make_question: Any, make_evaluation: Any, drifted: Any) -> None:
    """All eight questions of `small` turn wrong among 400 of `large`: a fiftieth of all, and everything of `small`."""
    asked = [make_question(f"l{i}") for i in range(400)]
    asked += [dataclasses.replace(make_question(f"s{i}"), dataset="small") for i in range(8)]
    now, before = (
        make_evaluation(name, asked, ["Tesk"] * 400 + [answer] * 8, calls=0, policy="w")
        for name, answer in (("now", "Veld"), ("before", "Tesk"))
    )
    found = drifted(now, before, asked)
    assert (found.beyond, found.differences["atlas"].mean) == (["small"], 0.0)


@cases("hash, message")
def test_only_like_evaluations_of_one_policy_are_paired(answered: Any, drifted: Any, hash: str, message: str) -> None:
    before, other = answered("before", {}), answered("now", {}, **{hash: "other"})
    assert same_setting(answered("now", {3: "Veld"}), before)
    assert not same_setting(other, before)
    with pytest.raises(ValueError, match=message):
        drifted(other, before)


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
    with pytest.raises(ValueError, match=r"aborted: 1 of 20"):
        drifted(challenger, make_evaluation("before", questions, ["Tesk"] * 20, policy="new"))


def evaluation(name: str, right: Sequence[float] | np.ndarray, **hashes: str | None) -> Evaluation:
    counts: dict[str, Any] = {"steps": 2, "tool_calls": 1, "tokens_read": 10, "tokens_sampled": 10}
    fixed: dict[str, Any] = {"run": name, "seed": 0, "policy_version": 1, "answer": "Tesk", "facts": {}, **counts}
    rows = [Prediction(question_id=f"q{i}", success=float(one), **fixed) for i, one in enumerate(right)]
    known = {key: value for key, value in {**HASHES, "policy": name, **hashes}.items() if value}
    return Evaluation(name=name, predictions=rows, trajectories=[], hashes=known)


def decided(challenger: Any, champion: Any, margin: float = 0.0, level: float = 0.95) -> Decision:
    """The decision about two evaluations, or about their success by question."""
    ours = challenger if isinstance(challenger, Evaluation) else evaluation("challenger", challenger)
    theirs = champion if isinstance(champion, Evaluation) else evaluation("champion", champion)
    return decide(ours, theirs, PromoteParams(margin=margin, level=level), DRAWS)


def test_ten_points_over_300_questions_are_promoted() -> None:
    """Of 300, 150 right in both, 45 in the challenger alone, 15 in the champion alone: 195 - 165 = 30, ten points."""
    found = decided([1] * 195 + [0] * 105, [1] * 150 + [0] * 45 + [1] * 15 + [0] * 90)
    assert found.promoted
    assert (found.questions, found.only_challenger_right, found.only_champion_right) == (300, 45, 15)
    assert (found.challenger_success, found.champion_success) == (0.65, 0.55)
    assert found.difference
    assert found.difference.mean == pytest.approx(0.1)
    # The normal interval: the variance of a difference is 60/300 - .1^2 = .19, so +- 1.96 sqrt(.19/300) = .0493.
    assert (found.difference.low, found.difference.high) == pytest.approx((0.0507, 0.1493), abs=0.005)
    assert found.reason == f"the lower bound {found.difference.low:+.3f} of the difference is above the margin +0.000"


def test_greedy_answers_beside_samples_are_told_and_decide_nothing() -> None:
    ours, theirs = evaluation("new", [1] * 70 + [0] * 30), evaluation("old", [0.5] * 100)
    plain = decided(ours, theirs)
    beside = [dataclasses.replace(row, sample=GREEDY, success=0.0) for row in ours.predictions]
    ours.predictions.extend(beside)
    theirs.predictions.extend(dataclasses.replace(row, success=1.0) for row in beside)
    found = decided(ours, theirs)
    assert found == dataclasses.replace(plain, greedily=[0.0, 1.0])
    assert ", greedily 0.000 against 1.000, the lower bound" in verdict(found)
    assert "| success of new, greedily | 0.000 |\n| success of old, greedily | 1.000 |" in decision_table(found)
    assert "greedily" not in verdict(plain) + decision_table(plain)


@cases("gained, lost, luck, promoted")
def test_few_questions_that_one_answers_right_may_be_luck(gained: int, lost: int, luck: float, promoted: bool) -> None:
    """Of 100 questions; the chance that as many coins or more show heads is at most .025."""
    alike = [1] * 50 + [0] * (50 - gained - lost)
    found = decided([*alike, *[1] * gained, *[0] * lost], [*alike, *[0] * gained, *[1] * lost])
    assert (found.luck, found.promoted) == (pytest.approx(luck), promoted)
    assert found.most_luck == pytest.approx(0.025)


def test_the_reason_and_the_table_tell_luck() -> None:
    found = decided([1] * 54 + [0] * 46, [1] * 50 + [0] * 50)
    assert found.difference
    assert found.reason == (
        f"the lower bound {found.difference.low:+.3f} of the difference is above the margin +0.000, but an equal one "
        "gains as much with a chance of 0.0625, above 0.0250"
    )
    assert "| chance of an equal one (sign test) | 0.0625, at most 0.0250 passes |" in decision_table(found)


@cases("ours, theirs, of, gate, promoted")
def test_margin_and_level_ask_for_more(ours: int, theirs: int, of: int, gate: Any, promoted: bool) -> None:
    challenger, champion = ([1] * right + [0] * (of - right) for right in (ours, theirs))
    assert decided(challenger, champion, **gate).promoted is promoted


@cases("ours, theirs, asked, differing")
def test_evaluations_measured_unlike_are_refused(ours: Any, theirs: Any, asked: int, differing: str) -> None:
    """A hash that is null was not written down."""
    challenger, champion = evaluation("new", [1] * 300, **ours), evaluation("old", [0] * asked, **theirs)
    found = decided(challenger, champion)
    assert (found.promoted, found.difference, found.questions) == (False, None, 0)
    assert found.reason == (
        f"they were not measured alike, they differ in {differing}; evaluate both under one configuration"
    )
    assert "|" not in decision_table(found)
    assert decision_table(found).startswith("new is refused against old: they were not measured alike")
