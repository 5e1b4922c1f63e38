"""MuSiQue's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_r1.data.formats import musique_paragraphs, musique_question
from agent_r1.data.rows import Row


def paragraph(title: str, is_supporting: bool = False) -> dict[str, Any]:
    return {"idx": 0, "title": title, "paragraph_text": f"On {title}. ", "is_supporting": is_supporting}


def row(**changes: Any) -> Row:
    fields = {
        "id": "3hop1__140786_2053_5289",
        "paragraphs": [paragraph("A", True), paragraph("x"), paragraph("B", True), paragraph("A", True)],
        "question": "Who?",
        "question_decomposition": [{"id": 1}, {"id": 2}, {"id": 3}],
        "answer": "G. Stanley Hall",
        "answer_aliases": ["Stanley Hall", "", "G. Stanley Hall"],
        "answerable": True,
    }
    return Row({key: value for key, value in {**fields, **changes}.items() if value is not ...}, Path("dev.jsonl"), 5)


def test_a_row_becomes_a_question_with_its_aliases() -> None:
    found = musique_question(row(), "musique", "test")
    assert (found.question_id, found.text, found.kind) == ("3hop1__140786_2053_5289", "Who?", "3hop1")
    assert found.answers == ["G. Stanley Hall", "Stanley Hall"]
    assert found.gold_titles == ["A", "B"]  # two gold passages share a title
    assert found.hops == 3


def test_any_number_of_paragraphs_is_taken() -> None:
    assert musique_paragraphs(row()) == [("A", "On A."), ("x", "On x."), ("B", "On B."), ("A", "On A.")]


def test_a_row_without_aliases_or_a_telling_id_is_taken() -> None:
    found = musique_question(row(id=7, answer_aliases=...), "musique", "test")
    assert (found.question_id, found.answers, found.kind) == ("7", ["G. Stanley Hall"], "3hop")


def test_an_unanswerable_question_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dev\.jsonl, row 5: not answerable, .* use the files named musique_ans"):
        musique_question(row(answerable=False), "musique", "test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": ...}, "field 'id'"),
        ({"answer": ...}, "field 'answer'"),
        ({"answer_aliases": "Hall"}, "field 'answer_aliases' must be a list of texts"),
        ({"question_decomposition": []}, "field 'question_decomposition' must be a list of objects"),
        ({"paragraphs": ["A"]}, "field 'paragraphs' must be a list of objects"),
        ({"paragraphs": [{"title": "A", "is_supporting": True}]}, "field 'paragraphs' must hold objects with title,"),
        ({"paragraphs": [paragraph("x")]}, "field 'paragraphs' must hold at least one with is_supporting: true"),
    ],
)
def test_a_malformed_row_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^dev\.jsonl, row 5: {message}"):
        musique_question(row(**changes), "musique", "test")
