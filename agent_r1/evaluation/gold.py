"""The passages that hold a question's evidence."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pyarrow.compute as pc

from agent_r1.records import Passage, Question
from agent_r1.tables import read_rows

log = logging.getLogger(__name__)


def gold_passages(questions: Sequence[Question], path: Path) -> dict[str, list[Passage]]:
    """By question_id the passages under its gold titles, in the order of the titles.

    Where several passages share a title all of them are gold, in the order of the file. A question without gold titles,
    or with one that is the title of no passage, is left out, and the log says how many are.

    Args:
        path: the prepared passages. Only those that are needed are read.

    Raises:
        ValueError: not one question has gold passages.
    """
    titles = {title for question in questions for title in question.gold_titles}
    under: dict[str, list[Passage]] = {}
    for passage in read_rows(path, Passage, pc.field("title").isin(sorted(titles))):
        under.setdefault(passage.title, []).append(passage)
    gold = {
        question.question_id: [passage for title in dict.fromkeys(question.gold_titles) for passage in under[title]]
        for question in questions
        if question.gold_titles and under.keys() >= set(question.gold_titles)
    }
    if not gold:
        raise ValueError(
            f"none of the {len(questions)} questions has gold passages: give them gold_titles that are titles of "
            "passages, or leave gold_passages out (of repro_baselines, too)"
        )
    if len(gold) < len(questions):
        log.warning("left out %d of %d questions: no gold passages", len(questions) - len(gold), len(questions))
    return gold
