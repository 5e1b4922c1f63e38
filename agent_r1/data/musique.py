"""MuSiQue-Ans (Trivedi et al. 2022): questions composed of two to four others."""

from __future__ import annotations

from typing import Any

from agent_r1.data.rows import Row
from agent_r1.records import Question


def question(row: Row, dataset: str, split: str) -> Question:
    """The question of a row; one hop per question it is composed of, its kind how they hang together (2hop to 4hop3).

    Two gold passages may share a title.

    Raises:
        ValueError: a field is missing or malformed, or the question has no answer; the message names file and row.
    """
    if row.fields.get("answerable") is False:
        raise ValueError(f"{row}: not answerable, so this is MuSiQue-Full; use the files named musique_ans")
    question_id = row.id("id")
    hops = len(row.objects("question_decomposition"))
    titles = [title for title, _, is_gold in _paragraphs(row) if is_gold]
    if not titles:
        raise row.fault("paragraphs", "must hold at least one with is_supporting: true")
    return Question(
        question_id=question_id,
        dataset=dataset,
        split=split,
        text=row.text("question"),
        answers=list(dict.fromkeys([row.text("answer"), *row.texts("answer_aliases")])),
        gold_titles=list(dict.fromkeys(titles)),
        hops=hops,
        kind=_kind(question_id, hops),
    )


def paragraphs(row: Row) -> list[tuple[str, str]]:
    """Titles and texts of the row's paragraphs, in its order: twenty of them, in some rows fewer.

    Raises:
        ValueError: the field is missing or malformed; the message names file, row and field.
    """
    return [(title, text) for title, text, _ in _paragraphs(row)]


def _paragraphs(row: Row) -> list[tuple[str, str, bool]]:
    return [_paragraph(row, each) for each in row.objects("paragraphs")]


def _paragraph(row: Row, fields: dict[str, Any]) -> tuple[str, str, bool]:
    match fields:
        case {"title": str(title), "paragraph_text": str(text), "is_supporting": bool(is_gold)}:
            return title, text.strip(), is_gold
    raise row.fault("paragraphs", "must hold objects with title, paragraph_text and is_supporting")


def _kind(question_id: str, hops: int) -> str:
    """The release's ids say it: 3hop1__140786_2053_5289."""
    named, separator, _ = question_id.partition("__")
    return named if separator else f"{hops}hop"
