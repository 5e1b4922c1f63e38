"""Graded answers and the table of scores, from hand-made episodes and predictions."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.evaluation.scores import (
    asked_questions,
    by_question,
    gold_passages,
    gold_recall_by_step,
    headline,
    in_words,
    measures,
    outcomes,
    predict,
    score,
)
from agent_r1.params.stages import EvaluateParams
from agent_r1.records import GREEDY, Outcome, Passage, Question, words_of
from agent_r1.tables import write_rows
from tests.cases import cases


def test_aborted_episodes_count_in_no_score(make_question: Any, make_trajectory: Any, draws: EvaluateParams) -> None:
    questions = [make_question("a"), make_question("b"), make_question("c")]
    ended = [make_trajectory("a"), dataclasses.replace(make_trajectory("b"), outcome=Outcome.TURN_LIMIT, answer="")]
    trajectories = [*ended, dataclasses.replace(make_trajectory("c"), outcome=Outcome.ABORTED, answer="")]
    predictions = predict(trajectories, questions, run="ppo", seed=0)
    assert [each.question_id for each in predictions] == ["a", "b"]
    scores = headline(score(predictions, questions, draws) | outcomes(trajectories))
    assert (scores["questions"], scores["aborted"], scores["em"]) == (2, 1, 0.5)
    ends = {name.removeprefix("outcome/"): scores[name] for name in scores if name.startswith("outcome/")}
    assert ends == {"answered": 0.5, "ended": 0.0, "turn_limit": 0.5, "token_limit": 0.0, "malformed": 0.0}
    assert gold_recall_by_step(trajectories, questions) == gold_recall_by_step(ended, questions)


def test_samples_of_a_question_by_hand(make_question: Any, make_trajectory: Any, draws: EvaluateParams) -> None:
    """a is right in 2 of 4 samples, b in 4: avg@4 is .75. One of two is right with a chance of 1 - 1/6 for a."""
    questions, answers = [make_question("a"), make_question("b")], ["Tesk", "Veld", "Veld", "Tesk"] + ["Tesk"] * 4
    trajectories = [
        dataclasses.replace(make_trajectory("ab"[place // 4], answer=answer), sample=place % 4)
        for place, answer in enumerate(answers)
    ]
    predictions = predict(trajectories, questions, run="ppo", seed=0)
    assert [each.sample for each in predictions] == [0, 1, 2, 3] * 2
    scores = score(predictions, questions, draws)
    assert (scores["questions"], scores["success"], scores["em"]) == (2, 0.75, 0.75)
    assert scores["pass_at_2"] == pytest.approx((5 / 6 + 1) / 2)
    assert scores["pass_hat_2"] == pytest.approx((1 / 6 + 1) / 2)
    assert (scores["pass_at_4"], scores["pass_hat_4"]) == (1.0, 0.5)
    assert scores["pass_hat_4/low"] == 0.0  # of two questions, as a bootstrap has it


def test_greedy_answer_is_no_sample(make_question: Any, make_trajectory: Any, draws: EvaluateParams) -> None:
    """a is right in 1 of 2 samples and greedily, b in none; of c, which has no sample, nothing is said."""
    questions = [make_question(name) for name in "abc"]
    made = [
        dataclasses.replace(make_trajectory(name, answer=answer), sample=sample)
        for name, sample, answer in [
            *(("a", 0, "Tesk"), ("a", 1, "Veld"), ("b", 0, "Veld"), ("b", 1, "Veld")),
            *(("a", GREEDY, "Tesk"), ("b", GREEDY, "Veld"), ("c", GREEDY, "Tesk")),
        ]
    ]
    predictions = predict(made, questions, run="ppo", seed=0)
    answers = {each.question_id: each.answers for each in by_question(predictions)}
    assert answers == {"a": ["Tesk", "Veld"], "b": ["Veld", "Veld"]}
    found = score(predictions, questions, draws) | outcomes([*made, dataclasses.replace(made[-1], answer="")])
    assert (found["questions"], found["success"], found["greedily"], found["pass_at_2"]) == (2, 0.25, 0.5, 0.5)
    assert found["outcome/answered"] == 1.0
    assert measures(by_question(predictions))[:3] == ["em", "greedily", "f1"]
    assert in_words(found, "exact match").endswith(", greedily 0.500 on 2 questions")
    assert gold_recall_by_step(made, questions) == gold_recall_by_step(made[:4], questions)


def test_a_question_that_lost_a_sample_counts_up_to_those_that_it_has(make_question: Any, make_trajectory: Any) -> None:
    cut = dataclasses.replace(make_trajectory("a"), outcome=Outcome.ABORTED)
    rows = [make_trajectory("a")] * 3 + [cut] + [make_trajectory("b")] * 4
    predictions = predict(rows, [make_question("a"), make_question("b")], "ppo", 0)
    first, second = by_question(predictions)
    assert [name for name in first.values if name.startswith("pass")] == ["pass_at_2", "pass_hat_2"]
    assert [name for name in second.values if name.startswith("pass_at")] == ["pass_at_2", "pass_at_4"]


@cases("calls, counted")
def test_calls_and_progress(make_question: Any, make_trajectory: Any, calls: list[str], counted: list[float]) -> None:
    (found,) = predict([make_trajectory("a", calls=calls)], [make_question("a")], run="ppo", seed=0)
    assert (found.steps, found.tool_calls, found.facts["gold_recall"]) == tuple(counted)


def test_every_token_is_read_or_sampled(make_question: Any, make_trajectory: Any) -> None:
    hand_made = dataclasses.replace(
        make_trajectory("a"),
        token_ids=np.arange(7, dtype=np.int32),
        source=np.array([0, 0, 1, 3, 2, 3, 1], dtype=np.uint8),  # prompt 2, actions 2, template 2, observation 1
        logprobs=np.zeros(7, dtype=np.float32),
        steps=[],
    )
    (prediction,) = predict([hand_made], [make_question("a")], run="ppo", seed=0)
    assert (prediction.tokens_read, prediction.tokens_sampled) == (5, 2)


def test_asked_questions_are_of_the_test_split_and_drawn_by_the_seed(make_question: Any) -> None:
    test = [make_question(f"q{i}") for i in range(20)]
    train = [dataclasses.replace(question, split="train") for question in test]
    assert asked_questions([*train, *test], 0, seed=0) == test
    drawn = [asked_questions(test, 5, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == [question for question in test if question in drawn[0]]  # in their order
    assert [len(questions) for questions in drawn] == [5, 5, 5]


def test_as_many_are_asked_of_every_data_set(make_question: Any) -> None:
    atlas = [make_question(f"a{i}") for i in range(8)]
    others = [dataclasses.replace(make_question(f"m{i}"), dataset="musique") for i in range(5)]
    mixed = [*atlas[:4], *others, *atlas[4:]]
    drawn = asked_questions(mixed, 3, seed=0)
    assert [question.dataset for question in drawn].count("atlas") == 3
    assert [question.dataset for question in drawn].count("musique") == 3
    assert drawn == [question for question in mixed if question in drawn]
    alone = asked_questions(atlas, 3, seed=0)
    assert alone == [question for question in drawn if question.dataset == "atlas"]  # whatever the others hold
    with pytest.raises(ValueError, match=r"evaluate\.questions is 6 and the test split of musique has 5; lower it"):
        asked_questions(mixed, 6, seed=0)
    with pytest.raises(ValueError, match="no test questions"):
        asked_questions([dataclasses.replace(question, split="train") for question in mixed], 0, seed=0)


def test_gold_recall_by_step_by_hand(make_question: Any, make_trajectory: Any) -> None:
    two, one, none = (
        dataclasses.replace(make_question(name), gold_titles=titles)
        for name, titles in (("two", ["Veld", "Tesk"]), ("one", ["Veld"]), ("none", []))
    )
    # Of two titles one per call: 1/2, then 2/2; a malformed call finds nothing: 0, then 1/1; the answer finds nothing.
    calls = {"two": ["ok", "ok"], "one": ["malformed", "ok"], "none": ["ok", "ok", "ok"]}
    trajectories = [make_trajectory(name, calls=statuses) for name, statuses in calls.items()]
    found = gold_recall_by_step(trajectories, [two, one, none])
    assert found == {"gold_recall/step_1": 0.25, "gold_recall/step_2": 1.0, "gold_recall/step_3": 1.0}
    short = [make_trajectory("one", calls=[]), trajectories[0]]  # an episode that ended keeps what it had
    assert gold_recall_by_step(short, [two, one, none])["gold_recall/step_3"] == 0.5
    assert gold_recall_by_step(trajectories[2:], [none]) == {}


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    titles = ["Tesk", "Veld", "Low Tide", "Veld"]
    rows = [Passage(passage_id=str(i), title=title, text=f"Text {i}.") for i, title in enumerate(titles)]
    write_rows(tmp_path / "passages.parquet", rows, Passage)
    return tmp_path / "passages.parquet"


def test_gold_passages_are_all_or_none(passages: Path, make_question: Any, caplog: pytest.LogCaptureFixture) -> None:
    golds = {"two": ["Veld", "Tesk", "Veld"], "none": [], "missing": ["Tesk", "Nowhere"]}
    two, *others = (dataclasses.replace(make_question(name), gold_titles=titles) for name, titles in golds.items())
    with caplog.at_level(logging.WARNING):
        found = gold_passages([two, *others], passages)
    assert {name: [row.passage_id for row in rows] for name, rows in found.items()} == {"two": ["1", "3", "0"]}
    assert "left out 2 of 3 questions: no gold passages" in caplog.text
    with pytest.raises(ValueError, match="none of the 2 questions has gold passages: give them gold_titles"):
        gold_passages(others, passages)


DRAWS = EvaluateParams(seed=0, questions=0, bootstrap_samples=200, history_kept=14)


@pytest.fixture
def scores(make_question: Any, make_trajectory: Any) -> dict[str, float]:
    kinds = {"a": (1, "lookup"), "b": (2, "bridge"), "c": (2, "comparison")}
    questions = [make_question(name, hops=hops, kind=kind) for name, (hops, kind) in kinds.items()]
    played = {"a": ("Tesk", ["ok"]), "b": ("Tesk", ["ok", "ok"]), "c": ("Tesk town", [])}
    trajectories = [make_trajectory(name, answer=answer, calls=calls) for name, (answer, calls) in played.items()]
    return score(predict(trajectories, questions, run="ppo", seed=0), questions, DRAWS)


def test_means_by_hand(scores: dict[str, float]) -> None:
    # EM 1, 1, 0; F1 1, 1, 2/3 ("tesk town" against "tesk": 1 shared of 2 + 1 words); calls 1, 2, 0.
    assert scores["em"] == pytest.approx(2 / 3)
    assert scores["f1"] == pytest.approx(8 / 9)
    assert scores["tool_calls"] == pytest.approx(1.0)
    assert scores["contains"] == 1.0
    assert (scores["em/hops_1"], scores["em/hops_2"]) == (1.0, 0.5)
    assert (scores["em/kind_bridge"], scores["em/kind_comparison"]) == (1.0, 0.0)
    assert scores["tool_calls/hops_2"] == 1.0
    assert [scores[f"questions{stratum}"] for stratum in ("", "/hops_1", "/hops_2")] == [3, 1, 2]


def test_what_a_world_calls_success_is_scored_by_the_strata_that_it_names(make_trajectory: Any) -> None:
    """Two boards: solved for 10.8 in two steps, and not for -.2; nobody asked for an answer."""
    about: dict[str, Any] = {"dataset": "boxes", "split": "test", "env": "sokoban", "text": "Push."}
    boards = [Question(question_id=name, strata={"solution": name}, **about) for name in ("1-3", "4-6")]
    won, lost = (make_trajectory(board.question_id, calls=["ok"]) for board in boards)
    rewards = [({"env": -0.1}, {"env": 10.9, "success": 1.0}), ({"env": -0.2}, {"success": 0.0})]
    trajectories = [
        dataclasses.replace(
            each,
            outcome=Outcome.ENDED,
            steps=[dataclasses.replace(step, rewards=stated) for step, stated in zip(each.steps, facts, strict=True)],
        )
        for each, facts in zip([won, lost], rewards, strict=True)
    ]
    predictions = predict(trajectories, boards, run="ppo", seed=0)
    assert [(each.success, each.facts) for each in predictions] == [(1.0, {"return": 10.8}), (0.0, {"return": -0.2})]
    shown = headline(score(predictions, boards, DRAWS))
    assert (shown["success"], shown["success/solution_1-3"], shown["return"]) == (0.5, 1.0, 5.3)
    assert words_of(boards) == ("solved", "not solved")
    assert words_of([boards[0], dataclasses.replace(boards[1], env="lake")]).right == "success"


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(ValueError, match="no predictions"):
        score([], [], DRAWS)
