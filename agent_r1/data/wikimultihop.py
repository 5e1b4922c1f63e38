"""2WikiMultihopQA (Ho et al. 2020): HotpotQA's layout with kinds and evidence of its own.

Rows without `entity_ids`, `evidences_id` and `answer_id` are as good as others: nothing of these is used. Answers are
title-cased in the release and stay so; answers are compared normalised.
"""

from __future__ import annotations

from agent_r1.data.hotpotqa import joined_context, supported_question
from agent_r1.data.rows import Row
from agent_r1.records import Question

KINDS = ("comparison", "bridge_comparison", "compositional", "inference")


def question(row: Row, dataset: str, split: str) -> Question:
    """The question of a row; one hop per gold passage, two or four.

    Raises:
        ValueError: a field is missing or malformed; the message names file, row and field.
    """
    return supported_question(row, dataset, split, KINDS)


def paragraphs(row: Row) -> list[tuple[str, str]]:
    """Titles and texts of the row's context, in its order.

    Raises:
        ValueError: the field is missing or malformed; the message names file, row and field.
    """
    return joined_context(row, " ")  # sentences come without the spaces between them
