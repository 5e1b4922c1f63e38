"""When a policy is validated, on which questions, and which is the best. Whole trainings are in test_learning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_r1.params import load
from agent_r1.records import Question
from agent_r1.training.questions import draw_unseen, is_best, is_due, is_exhausted

CONFIG = load(Path(__file__).parents[2] / "params.yaml").train


def config(**changes: Any) -> Any:
    return CONFIG.model_copy(update={"validation": CONFIG.validation.model_copy(update=changes)})


def history(*scores: float | None) -> list[dict[str, float]]:
    return [{"validation/success": score} if score is not None else {} for score in scores]


@pytest.mark.parametrize(
    ("every", "scores", "complete", "due"),
    [
        (0, [None, None], True, False),
        (2, [], False, False),
        (2, [None], False, False),
        (2, [None, None], False, True),
        (2, [None, 0.5], False, False),  # it was, before a kill
        (2, [None, 0.5, None], True, True),  # the last policy, whatever its number
    ],
)
def test_every_so_many_policies_and_the_last_are_validated(
    every: int, scores: Sequence[float | None], complete: bool, due: bool
) -> None:
    assert is_due(history(*scores), config(every=every), complete=complete) is due


def test_the_best_is_better_than_every_other() -> None:
    assert is_best(history(None), 0.0)
    assert is_best(history(0.3, None, 0.4, None), 0.5)
    assert not is_best(history(0.3, None, 0.5, None), 0.5), "of equals the earlier one"


@pytest.mark.parametrize(
    ("scores", "exhausted"),
    [
        ([], False),
        ([0.5, 0.4], False),
        ([0.5, 0.4, None, 0.5], True),  # two validations after the first .5, none of them better
        ([0.5, 0.4, 0.6, 0.1], False),
    ],
)
def test_patience_counts_validations_without_a_better_policy(scores: Sequence[float | None], exhausted: bool) -> None:
    assert is_exhausted(history(*scores), patience=2) is exhausted
    assert not is_exhausted(history(*scores), patience=0)


def test_every_run_is_asked_the_same_dev_questions_of_each_data_set() -> None:
    def questions(dataset: str, split: str) -> list[Question]:
        return [
            Question(
                question_id=f"{dataset} {split} {n}",
                dataset=dataset,
                split=split,
                text="?",
                answers=["yes"],
                gold_titles=[],
                strata={"hops": "1", "kind": ""},
            )
            for n in range(9)
        ]

    prepared = [each for dataset in "ab" for split in ("train", "dev") for each in questions(dataset, split)]
    asked = draw_unseen(prepared, config(every=1, questions=4))
    assert [question.dataset for question in asked] == ["a"] * 4 + ["b"] * 4
    assert {question.split for question in asked} == {"dev"}
    assert draw_unseen(prepared, config(every=1, questions=4).model_copy(update={"seed": 7})) == asked
    assert len(draw_unseen(prepared, config(every=1, questions=0))) == 18
    with pytest.raises(ValueError, match="questions is 10 and the dev split of a has 9"):
        draw_unseen(prepared, config(every=1, questions=10))
    with pytest.raises(ValueError, match=r"none are prepared; set train\.validation\.every: 0"):
        draw_unseen(questions("a", "train"), config(every=1, questions=1))
