"""Episodes become graded answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agent_r1.evaluation.predictions import asked_questions, predict


def test_one_prediction_per_trajectory_in_their_order(make_question: Any, make_trajectory: Any) -> None:
    questions = [make_question("a"), make_question("b", answer="Mara Quill of Tesk")]
    trajectories = [make_trajectory("b", answer="Mara Quill"), make_trajectory("a", answer="the Tesk!")]
    first, second = predict(trajectories, questions, run="ppo", seed=7)
    # "mara quill" against "mara quill of tesk": 2 shared of 2 + 4 words, F1 = 4/6.
    assert (first.question_id, first.em, first.contains) == ("b", 0.0, 0.0)
    assert first.f1 == pytest.approx(2 / 3)
    assert (second.question_id, second.em, second.f1, second.contains) == ("a", 1.0, 1.0, 1.0)
    assert (second.run, second.seed, second.policy_version) == ("ppo", 7, 30)


def test_attempted_calls_count_and_progress_adds_up(make_question: Any, make_trajectory: Any) -> None:
    # Three calls, one of them malformed, then the answer: 4 steps, 3 calls, progress at the 2 good ones.
    trajectory = make_trajectory("a", calls=["ok", "malformed", "ok"])
    (prediction,) = predict([trajectory], [make_question("a")], run="ppo", seed=0)
    assert (prediction.steps, prediction.tool_calls, prediction.gold_titles_found) == (4, 3, 2)


def test_no_call_no_gold(make_question: Any, make_trajectory: Any) -> None:
    (prediction,) = predict([make_trajectory("a", calls=[])], [make_question("a")], run="ppo", seed=0)
    assert (prediction.steps, prediction.tool_calls, prediction.gold_titles_found) == (1, 0, 0)


def test_asked_questions_are_of_the_test_split_and_drawn_by_the_seed(make_question: Any) -> None:
    test = [make_question(f"q{i}") for i in range(20)]
    train = [dataclasses.replace(question, split="train") for question in test]
    assert asked_questions([*train, *test], 0, seed=0) == test
    drawn = [asked_questions(test, 5, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == [question for question in test if question in drawn[0]]  # in their order
    assert [len(questions) for questions in drawn] == [5, 5, 5]


def test_more_questions_than_there_are_is_refused(make_question: Any) -> None:
    with pytest.raises(ValueError, match=r"evaluate\.questions is 2 and the test split has 1"):
        asked_questions([make_question("a")], 2, seed=0)
    with pytest.raises(ValueError, match="no test questions"):
        asked_questions([dataclasses.replace(make_question("a"), split="train")], 0, seed=0)
