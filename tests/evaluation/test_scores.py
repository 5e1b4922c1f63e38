"""Scores of three hand-made questions."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.evaluation.predictions import predict
from agent_r1.evaluation.scores import headline, score


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
    return score(predict(trajectories, questions, run="ppo", seed=0), questions, samples=200, seed=0)


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
    assert len(means) == 3 * 6  # three measures; all, two hop counts, three kinds
    assert all(scores[f"{key}/low"] <= scores[key] <= scores[f"{key}/high"] for key in means)


def test_headline_is_short_and_rounded(scores: dict[str, float]) -> None:
    shown = headline(scores)
    assert list(shown) == ["em", "em/low", "em/high", "em/hops_1", "em/hops_2", "f1", "tool_calls"]
    assert shown["em"] == 0.6667


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(ValueError, match="no predictions"):
        score([], [], samples=100, seed=0)
