"""Questions of a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_r1.data.formats import generic_question
from agent_r1.data.rows import Row


def row(**fields: Any) -> Row:
    return Row({"question": "Who?", **fields}, Path("own/train.jsonl.gz"), 3)


def test_a_question_and_its_answers_are_enough() -> None:
    found = generic_question(row(answers=["Ann", "A. Bell"]), "own", "train")
    assert (found.question_id, found.dataset, found.split) == ("own-train-train.jsonl.gz-3", "own", "train")
    assert (found.text, found.answers) == ("Who?", ["Ann", "A. Bell"])
    assert (found.gold_titles, found.hops, found.kind) == ([], 1, "unknown")


def test_what_is_known_is_kept_and_the_rest_passed_over() -> None:
    found = generic_question(
        row(id=9, answer="Ann", gold_titles=["A", "B"], kind="bridge", source="mine"), "own", "train"
    )
    assert (found.question_id, found.answers, found.hops, found.kind) == ("9", ["Ann"], 2, "bridge")
    assert generic_question(row(answer="Ann", gold_titles=["A"], hops=3), "own", "train").hops == 3


def test_null_is_as_good_as_no_field() -> None:
    """An optional column of a Parquet file holds it wherever nothing is known."""
    known = row(answer="Ann")
    unknown = row(answer="Ann", answers=None, id=None, _id=None, gold_titles=None, hops=None, kind=None)
    assert generic_question(unknown, "own", "train") == generic_question(known, "own", "train")
    assert generic_question(row(answer="Ann", id=None, _id="7"), "own", "train").question_id == "7"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "answer"),
        ({"answers": []}, "answers"),
        ({"answers": "Ann"}, "answers"),
        ({"answers": [7]}, "answers"),
        ({"answer": "Ann", "question": ""}, "question"),
        ({"answer": "Ann", "id": ""}, "id"),
        ({"answer": "Ann", "gold_titles": "A"}, "gold_titles"),
        ({"answer": "Ann", "hops": 0}, "hops"),
        ({"answer": "Ann", "hops": "2"}, "hops"),
        ({"answer": "Ann", "kind": 2}, "kind"),
        ({"answer": "Ann", "kind": ""}, "kind"),
        ({"answer": None}, "answer"),
    ],
)
def test_a_malformed_row_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"^own/train\.jsonl\.gz, row 3: field '{field}' must"):
        generic_question(row(**fields), "own", "train")
