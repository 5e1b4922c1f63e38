"""What the attempts of every protocol have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.params import load
from agent_r1.records import Passage, Question
from agent_r1.rollout.attempts import (
    asked_attempt,
    closed_book_attempts,
    gold_passages_attempts,
    naive_rag_attempts,
    tool_attempts,
)
from agent_r1.search.base import Search

PARAMS = load(Path(__file__).parents[2] / "params.yaml").env


@pytest.mark.parametrize("instructions", ["", "Be brief."])
def test_every_protocol_gives_the_configured_instructions(
    hostile_question: Question, hostile_index: Search, instructions: str
) -> None:
    params = PARAMS.model_copy(update={"instructions": instructions})
    questions = [hostile_question]
    gold = {hostile_question.question_id: [Passage(passage_id="p", title="t", text="x")]}
    attempts = [
        *tool_attempts(questions, hostile_index, params),
        asked_attempt("Who?", hostile_index, params),
        *naive_rag_attempts(questions, hostile_index, params),
        *closed_book_attempts(questions, params),
        *gold_passages_attempts(questions, gold, params),
    ]
    added = f" {instructions}" if instructions else ""
    assert [attempt.env.system for attempt in attempts] == [
        "Answer the question. Search when facts are missing." + added,
        "Answer the question. Search when facts are missing." + added,
        "Answer the question from the passages." + added,
        "Answer the question." + added,
        "Answer the question from the passages." + added,
    ]
