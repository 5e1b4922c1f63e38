"""The questions of iterations, refills and validations. Whole trainings are in test_learning."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_r1.params import load
from agent_r1.params.places import RunId
from agent_r1.params.sections import override
from agent_r1.records import Question
from agent_r1.training.loop import Training
from agent_r1.training.questions import (
    draw,
    draw_further,
    draw_unseen,
    is_due,
    is_exhausted,
    require_gold_titles,
    validation_scores,
)
from tests.cases import cases
from tests.credit.letters import trajectory

PARAMS = load(Path(__file__).parents[2] / "params.yaml")
PLAIN: dict[str, Any] = {"text": "?", "answers": ["x"], "gold_titles": [], "strata": {"hops": "1", "kind": "lookup"}}


def pool(size: int, dataset: str = "atlas", split: str = "train") -> list[Question]:
    names = [f"{dataset} {split} {number}" for number in range(size)]
    return [Question(question_id=name, dataset=dataset, split=split, **PLAIN) for name in names]


def drawn(size: int, count: int, iteration: int, seed: int = 0, left_out: Collection[str] = ()) -> list[str]:
    found = draw(pool(size), count, iteration=iteration, seed=seed, left_out=left_out)
    return [question.question_id for question in found]


def ids(questions: Sequence[Question]) -> list[str]:
    return sorted(question.question_id for question in questions)


def test_a_pass_takes_every_question_once_and_the_next_in_another_order() -> None:
    """12 questions, 4 per iteration: three iterations are a pass."""
    first, second = (
        [question for iteration in passes for question in drawn(12, 4, iteration)] for passes in ([0, 1, 2], [3, 4, 5])
    )
    assert sorted(first) == sorted(second) == ids(pool(12))
    assert first != second
    assert drawn(50, 10, 3) == drawn(50, 10, 3) != drawn(50, 10, 3, seed=1)
    across = [drawn(7, 5, iteration) for iteration in range(9)]
    assert all(len({*names}) == 5 for names in across), "none twice where a pass ends amidst an iteration"


def test_another_stands_in_for_a_question_without_room_and_the_others_keep_their_places() -> None:
    """So whoever raises the limit amidst a run neither skips a question nor meets one again."""
    whole = [drawn(12, 4, iteration) for iteration in range(6)]
    left_out = whole[1][2]
    found = [drawn(12, 4, iteration, left_out={left_out}) for iteration in range(6)]
    changed = [iteration for iteration in range(6) if left_out in whole[iteration]]
    assert [iteration for iteration in range(6) if found[iteration] != whole[iteration]] == changed
    assert (len(changed), changed[0]) == (2, 1)
    *kept, stand_in = found[1]
    assert kept == [name for name in whole[1] if name != left_out]
    assert stand_in not in whole[1]
    assert found[1] == drawn(12, 4, 1, left_out={left_out})
    names = ids(pool(12))
    assert sorted(drawn(12, 4, 1, left_out=names[:8])) == names[8:], "who stands in has room itself"


def test_more_than_there_are_or_have_room_is_refused() -> None:
    with pytest.raises(ValueError, match="questions is 6 and there are 5 training questions; lower it"):
        drawn(5, 6, 0)
    assert len(drawn(5, 4, 0, left_out=["atlas train 0"])) == 4
    with pytest.raises(ValueError, match=r"is 5 and there are 4 training questions with room for an action; lower it"):
        drawn(5, 5, 0, left_out=["atlas train 0"])


def further(count: int, besides: set[str], refill: int = 0, iteration: int = 0) -> list[str]:
    found = draw_further(pool(12), count, besides=besides, iteration=iteration, refill=refill, seed=0)
    return [question.question_id for question in found]


def test_further_questions_are_others_and_no_more_than_there_are() -> None:
    asked = set(drawn(12, 4, 0))
    first = further(5, asked)
    assert len(set(first) - asked) == len(first) == 5
    assert first == further(5, asked)
    assert first not in (further(5, asked, refill=1), further(5, asked, iteration=1))
    asked = set(drawn(12, 10, 0))
    assert sorted(further(5, asked)) == sorted({*ids(pool(12))} - asked)
    assert further(0, asked) == []


def test_progress_is_refused_where_a_data_set_names_no_gold_passages() -> None:
    config = PARAMS.run(RunId("ppo"))
    paid = type(config).model_validate(override(config.model_dump(), {"credit": {"rewards": {"progress": 0.1}}}))
    bare, nowhere = pool(2), cast(Any, SimpleNamespace(config=paid))
    titled = [dataclasses.replace(each, dataset="hotpotqa", gold_titles=["Tesk"]) for each in bare]
    mixed = [*titled, dataclasses.replace(titled[0], gold_titles=[])]  # one that lacks them stands beside others
    require_gold_titles(bare, config.credit)
    require_gold_titles(mixed, paid.credit)
    with pytest.raises(ValueError, match=r"rewards\.progress 0\.1 pays .* no question of atlas names any; set it to 0"):
        Training(PARAMS, questions=[*mixed, *bare], shared=cast(Any, None), model="nowhere", folder=nowhere)


def config(**changes: Any) -> Any:
    return PARAMS.train.model_copy(update={"validation": PARAMS.train.validation.model_copy(update=changes)})


def history(*scores: float | None) -> list[dict[str, float]]:
    return [{"validation/success": score} if score is not None else {} for score in scores]


@cases("every, scores, complete, due")
def test_validations_come_every_so_often(every: int, scores: Sequence[float | None], complete: bool, due: bool) -> None:
    assert is_due(history(*scores), config(every=every), complete=complete) is due


def test_an_episode_whose_prompt_left_no_room_is_no_success() -> None:
    answered, full = trajectory("PA", [{"rewards": {"em": 1.0, "f1": 1.0}}]), trajectory("P")
    assert validation_scores([answered, full]) == {
        "validation/success": 0.5,
        "validation/f1": 0.5,
        "validation/aborted": 0.0,
    }


@cases("scores, exhausted")
def test_patience_counts_validations_without_a_better_policy(scores: Sequence[float | None], exhausted: bool) -> None:
    assert is_exhausted(history(*scores), patience=2) is exhausted
    assert not is_exhausted(history(*scores), patience=0)


def test_every_run_is_asked_the_same_dev_questions_of_each_data_set() -> None:
    prepared = [each for dataset in "ab" for split in ("train", "dev") for each in pool(9, dataset, split)]
    asked = draw_unseen(prepared, config(every=1, questions=4))
    assert [question.dataset for question in asked] == ["a"] * 4 + ["b"] * 4
    assert {question.split for question in asked} == {"dev"}
    assert draw_unseen(prepared, config(every=1, questions=4).model_copy(update={"seed": 7})) == asked
    assert len(draw_unseen(prepared, config(every=1, questions=0))) == 18
    with pytest.raises(ValueError, match="questions is 10 and the dev split of a has 9"):
        draw_unseen(prepared, config(every=1, questions=10))
    with pytest.raises(ValueError, match=r"none are prepared; set train\.validation\.every: 0"):
        draw_unseen(pool(9, "a"), config(every=1, questions=1))
