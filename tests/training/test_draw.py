"""Which questions an iteration attempts: passes over all of them, never one twice in an iteration."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.params import load
from agent_r1.params.places import RunId
from agent_r1.params.sections import override
from agent_r1.records import Question
from agent_r1.training.loop import Training
from agent_r1.training.questions import draw, draw_further, require_gold_titles

PARAMS = load(Path(__file__).parents[2] / "params.yaml")


def pool(size: int) -> list[Question]:
    return [
        Question(
            question_id=f"q{i}",
            dataset="atlas",
            split="train",
            text="?",
            answers=["x"],
            gold_titles=[],
            strata={"hops": "1", "kind": "lookup"},
        )
        for i in range(size)
    ]


def drawn(size: int, count: int, iteration: int, seed: int = 0) -> list[str]:
    return [question.question_id for question in draw(pool(size), count, iteration=iteration, seed=seed)]


def test_a_pass_takes_every_question_once_and_the_next_in_another_order() -> None:
    """12 questions, 4 per iteration: three iterations are a pass."""
    first, second = (
        [question for iteration in passes for question in drawn(12, 4, iteration)] for passes in ([0, 1, 2], [3, 4, 5])
    )
    assert sorted(first) == sorted(second) == sorted(question.question_id for question in pool(12))
    assert first != second


@given(st.integers(1, 20), st.data(), st.integers(0, 30), st.integers(0, 3))
def test_an_iteration_holds_its_number_of_questions_and_none_twice(
    size: int, data: st.DataObject, iteration: int, seed: int
) -> None:
    """Twice the same question would be two groups of the same episodes, id for id."""
    count = data.draw(st.integers(1, size))
    found = drawn(size, count, iteration, seed)
    assert len(found) == len(set(found)) == count


def test_the_draw_follows_from_iteration_and_seed() -> None:
    assert drawn(50, 10, 3) == drawn(50, 10, 3)
    assert drawn(50, 10, 3) != drawn(50, 10, 4)
    assert drawn(50, 10, 3) != drawn(50, 10, 3, seed=1)


def test_more_than_there_are_is_refused() -> None:
    assert len(drawn(5, 5, 0)) == 5
    with pytest.raises(ValueError, match="questions is 6 and there are 5 training questions; lower it"):
        drawn(5, 6, 0)


def further(count: int, besides: set[str], refill: int = 0, iteration: int = 0) -> list[str]:
    found = draw_further(pool(12), count, besides=besides, iteration=iteration, refill=refill, seed=0)
    return [question.question_id for question in found]


def test_further_questions_are_others() -> None:
    asked = set(drawn(12, 4, 0))
    first = further(5, asked)
    assert len(set(first) - asked) == len(first) == 5
    assert first == further(5, asked)
    assert first != further(5, asked, refill=1)
    assert first != further(5, asked, iteration=1)


def test_no_more_further_questions_than_there_are() -> None:
    asked = set(drawn(12, 10, 0))
    assert sorted(further(5, asked)) == sorted({question.question_id for question in pool(12)} - asked)
    assert further(0, asked) == []


def test_progress_is_refused_where_a_data_set_names_no_gold_passages() -> None:
    """Before anything is loaded: there is neither a model nor a folder."""
    config = PARAMS.run(RunId("ppo"))
    paid = type(config).model_validate(override(config.model_dump(), {"credit": {"rewards": {"progress": 0.1}}}))
    bare = pool(2)
    titled = [dataclasses.replace(each, dataset="hotpotqa", gold_titles=["Tesk"]) for each in bare]
    mixed = [*titled, dataclasses.replace(titled[0], gold_titles=[])]  # one that lacks them stands beside others
    require_gold_titles(bare, config.credit)
    require_gold_titles(mixed, paid.credit)
    with pytest.raises(ValueError, match=r"rewards\.progress 0\.1 pays .* no question of atlas names any; set it to 0"):
        Training(PARAMS, paid, questions=[*mixed, *bare], shared=None, model="nowhere", folder=None)  # type: ignore[arg-type]
