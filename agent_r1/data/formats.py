"""The layouts of the published data sets, and of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_r1.data.rows import Row
from agent_r1.records import Question

HOTPOTQA_KINDS = ("bridge", "comparison")


def hotpotqa_question(row: Row, dataset: str, split: str) -> Question:
    """The question of a row; one hop per gold passage.

    Raises:
        ValueError: a field is missing or malformed; the message names file, row and field.
    """
    return supported_question(row, dataset, split, HOTPOTQA_KINDS)


def hotpotqa_paragraphs(row: Row) -> list[tuple[str, str]]:
    """Titles and texts of the row's context, in its order: ten of them, in some rows fewer.

    In the fullwiki setting the context is what a search found, and gold passages may be missing.

    Raises:
        ValueError: the field is missing or malformed; the message names file, row and field.
    """
    return joined_context(row, "")  # all sentences but the first open with their space


def supported_question(row: Row, dataset: str, split: str, kinds: Sequence[str]) -> Question:
    """A question whose gold passages are those of its supporting facts.

    The facts' sentence numbers are not looked at: in some rows of the releases they are beyond their paragraph.
    """
    titles = list(dict.fromkeys(title for title, _ in row.pairs("supporting_facts", "sent_id")))
    return Question(
        question_id=row.id(row.first("_id", "id")),  # the releases say _id, the Hub says id
        dataset=dataset,
        split=split,
        text=row.text("question"),
        answers=[row.text("answer")],
        gold_titles=titles,
        hops=len(titles),
        kind=row.choice("type", kinds),
    )


def joined_context(row: Row, separator: str) -> list[tuple[str, str]]:
    """The paragraphs of a context, their sentences joined."""
    found = row.pairs("context", "sentences")
    if not all(
        isinstance(sentences, list) and all(isinstance(each, str) for each in sentences) for _, sentences in found
    ):
        raise row.fault("context", "must hold [title, [sentence, ...]] pairs")
    return [(title, separator.join(sentences).strip()) for title, sentences in found]


WIKIMULTIHOP_KINDS = ("comparison", "bridge_comparison", "compositional", "inference")


def wikimultihop_question(row: Row, dataset: str, split: str) -> Question:
    """The question of a row; one hop per gold passage, two or four.

    Raises:
        ValueError: a field is missing or malformed; the message names file, row and field.
    """
    return supported_question(row, dataset, split, WIKIMULTIHOP_KINDS)


def wikimultihop_paragraphs(row: Row) -> list[tuple[str, str]]:
    """Titles and texts of the row's context, in its order.

    Raises:
        ValueError: the field is missing or malformed; the message names file, row and field.
    """
    return joined_context(row, " ")  # sentences come without the spaces between them


def musique_question(row: Row, dataset: str, split: str) -> Question:
    """The question of a row; one hop per question it is composed of, its kind how they hang together (2hop to 4hop3).

    Two gold passages may share a title.

    Raises:
        ValueError: a field is missing or malformed, or the question has no answer; the message names file and row.
    """
    if row.fields.get("answerable") is False:
        raise ValueError(f"{row}: not answerable, so this is MuSiQue-Full; use the files named musique_ans")
    question_id = row.id("id")
    hops = len(row.objects("question_decomposition"))
    titles = [title for title, _, is_gold in MUSIQUE__paragraphs(row) if is_gold]
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


def musique_paragraphs(row: Row) -> list[tuple[str, str]]:
    """Titles and texts of the row's paragraphs, in its order: twenty of them, in some rows fewer.

    Raises:
        ValueError: the field is missing or malformed; the message names file, row and field.
    """
    return [(title, text) for title, text, _ in MUSIQUE__paragraphs(row)]


def MUSIQUE__paragraphs(row: Row) -> list[tuple[str, str, bool]]:
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


UNKNOWN = "unknown"


def generic_question(row: Row, dataset: str, split: str) -> Question:
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


def generic_paragraphs(row: Row) -> list[tuple[str, str]]:
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
