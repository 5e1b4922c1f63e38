"""The prepare stage: a data set becomes questions and passages on disk."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from agent_r1.data import atlas, hotpotqa
from agent_r1.data.plans import Facts, Plan, plan_from_titles
from agent_r1.params import PrepareParams
from agent_r1.records import Passage, Question
from agent_r1.tables import write_rows

logger = logging.getLogger(__name__)

QUESTIONS, PASSAGES = "questions.parquet", "passages.parquet"


def prepare(params: PrepareParams, directory: Path) -> None:
    """Writes questions.parquet and passages.parquet to `directory`.

    On an error what was there before stays whole, and nothing else is left behind.

    Raises:
        FileNotFoundError, ValueError: the data set is missing, malformed or cannot be generated.
        OSError: the disk is full or not writable.
    """
    questions, passages = load(params)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".prepare.", dir=directory) as unfinished:
        staging = Path(unfinished)
        write_rows(staging / QUESTIONS, questions, Question)
        write_rows(staging / PASSAGES, passages, Passage)
        for name in (QUESTIONS, PASSAGES):
            (staging / name).replace(directory / name)
    splits = Counter(question.split for question in questions)
    logger.info("prepared %s: %d passages, questions %s", params.dataset, len(passages), dict(splits))


def load(params: PrepareParams) -> tuple[list[Question], list[Passage]]:
    """The questions and passages of the configured data set."""
    if params.dataset == "atlas":
        return atlas.generate(params.atlas, params.seed)
    return hotpotqa.load(params.hotpotqa)


def plans(params: PrepareParams, questions: Sequence[Question]) -> tuple[dict[str, Plan], Facts]:
    """What a demonstrator needs: a plan for every question by question_id, and the facts (none for real data)."""
    if params.dataset == "atlas":
        return atlas.plans(params.atlas, params.seed), atlas.facts(params.atlas, params.seed)
    return {question.question_id: plan_from_titles(question) for question in questions}, {}
