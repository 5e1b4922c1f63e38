"""HotpotQA (Yang et al. 2018), distractor and fullwiki, and what 2WikiMultihopQA took over of its layout."""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.data.rows import Row
from agent_r1.records import Question

KINDS = ("bridge", "comparison")


def question(row: Row, dataset: str, split: str) -> Question:
    """The question of a row; one hop per gold passage.

    Raises:
        ValueError: a field is missing or malformed; the message names file, row and field.
    """
    return supported_question(row, dataset, split, KINDS)


def paragraphs(row: Row) -> list[tuple[str, str]]:
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
