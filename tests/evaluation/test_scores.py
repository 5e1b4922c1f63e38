"""Scores of three hand-made questions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agent_r1.evaluation.predictions import predict
from agent_r1.evaluation.scores import MEASURES, headline, score
from agent_r1.params import EvaluateParams

DRAWS = EvaluateParams(seed=0, questions=0, bootstrap_samples=200, history_kept=14)


@pytest.fixture
def scores(make_question: Any, make_trajectory: Any) -> dict[str, float]:
    questions = [
        make_question("a", hops=1, kind="lookup"),
        make_question("b", hops=2, kind="bridge"),
        make_question("c", hops=2, kind="comparison"),
    ]
    trajectories = [
        make_trajectory("a", answer="Tesk", calls=["ok"]),
        make_trajectory("b", answer="Tesk", calls=["ok", "ok"]),
        make_trajectory("c", answer="Tesk town", calls=[]),
    ]
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


def test_every_mean_lies_in_its_interval(scores: dict[str, float]) -> None:
    means = [key.removesuffix("/low") for key in scores if key.endswith("/low")]
    assert len(means) == len(MEASURES) * 6  # all, two hop counts, three kinds
    assert all(scores[f"{key}/low"] <= scores[key] <= scores[f"{key}/high"] for key in means)


def test_headline_is_short_and_rounded(scores: dict[str, float]) -> None:
    shown = headline(scores)
    assert list(shown)[:7] == ["questions", "em", "em/low", "em/high", "f1", "f1/low", "f1/high"]
    assert len(shown) == 1 + 3 * len(MEASURES) + 2
    assert list(shown)[-2:] == ["em/hops_1", "em/hops_2"]
    assert shown["em"] == 0.6667


def test_gold_recall_by_hand(scores: dict[str, float]) -> None:
    # One gold title each; found once, twice (the fixture gives progress at every call: 2 of 1), never.
    assert scores["gold_recall"] == pytest.approx(1.0)
    assert (scores["gold_recall/hops_1"], scores["gold_recall/kind_comparison"]) == (1.0, 0.0)


def test_questions_without_gold_titles_have_no_recall(make_question: Any, make_trajectory: Any) -> None:
    unknown = dataclasses.replace(make_question("a"), gold_titles=[])
    known = dataclasses.replace(make_question("b"), gold_titles=["Veld", "Tesk"])
    trajectories = [make_trajectory("a"), make_trajectory("b")]
    predictions = predict(trajectories, [unknown, known], run="ppo", seed=0)
    assert score(predictions, [unknown, known], DRAWS)["gold_recall"] == 0.5  # of b alone
    alone = score(predictions[:1], [unknown], DRAWS)
    assert not [key for key in alone if key.startswith("gold_recall")]
    assert "gold_recall" not in headline(alone)


def test_several_data_sets_are_scored_apart(make_question: Any, make_trajectory: Any) -> None:
    questions = [make_question("a"), dataclasses.replace(make_question("b"), dataset="musique"), make_question("c")]
    trajectories = [make_trajectory("a"), make_trajectory("b", answer="Tesk town"), make_trajectory("c", answer="x")]
    found = score(predict(trajectories, questions, run="ppo", seed=0), questions, DRAWS)
    assert (found["em/dataset_atlas"], found["em/dataset_musique"]) == (0.5, 0.0)
    assert (found["questions/dataset_atlas"], found["questions/dataset_musique"]) == (2, 1)
    shown = headline(found)
    assert (shown["em/dataset_atlas"], shown["f1/dataset_musique"]) == (0.5, 0.6667)


def test_one_data_set_is_no_stratum(scores: dict[str, float]) -> None:
    assert not [key for key in scores if "dataset_" in key]


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(ValueError, match="no predictions"):
        score([], [], DRAWS)
