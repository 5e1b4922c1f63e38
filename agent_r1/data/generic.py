"""Questions of one's own: rows of `question` and `answers`, and as much else as is known."""

from __future__ import annotations

from agent_r1.data.rows import Row
from agent_r1.records import Question

UNKNOWN = "unknown"


def question(row: Row, dataset: str, split: str) -> Question:
    """The question of a row.

    `question`, and `answers` (accepted ones, the canonical one first) or a single `answer`, must be there; `id`,
    `gold_titles`, `hops` and `kind` need not be, or may be null. Without an id the row's place is its id, without hops
    every gold title is one. Other fields are passed over.

    Raises:
        ValueError: a field is missing or malformed; the message names file, row and field.
    """
    titles = row.texts("gold_titles")
    named = row.first("id", "_id")
    return Question(
        question_id=row.id(named) if row.has(named) else f"{dataset}-{split}-{row.path.name}-{row.number}",
        dataset=dataset,
        split=split,
        text=row.text("question"),
        answers=_answers(row),
        gold_titles=titles,
        hops=_hops(row, titles),
        kind=row.text("kind") if row.has("kind") else UNKNOWN,
    )


def paragraphs(row: Row) -> list[tuple[str, str]]:
    """None: what is searched is a corpus of its own."""
    return []


def _answers(row: Row) -> list[str]:
    answers = row.texts("answers") if row.has("answers") else [row.text("answer")]
    if not answers:
        raise row.fault("answers", "must hold at least one text that is not empty")
    return answers


def _hops(row: Row, titles: list[str]) -> int:
    hops = row.fields.get("hops")
    if hops is None:
        return max(1, len(titles))
    if type(hops) is not int or hops < 1:
        raise row.fault("hops", "must be a number from 1 on")
    return hops
