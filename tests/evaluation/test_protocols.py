"""The questions of a training that are drawn to be looked at."""

from pathlib import Path

import pytest

from agent_r1.evaluation.protocols import training_questions
from agent_r1.params import SHIPPED, load
from agent_r1.records import Question
from agent_r1.tables import write_rows
from tests.trajectories import question_fields


def test_training_questions_are_drawn_from_train_split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(SHIPPED)
    other = settings.model_copy(update={"evaluate": settings.evaluate.model_copy(update={"seed": 1})})
    rows = [Question(**question_fields(f"{split}{n}", split=split)) for split in ("train", "test") for n in range(9)]
    write_rows(settings.places.questions, rows, Question)
    drawn = training_questions(settings, 5)
    assert {question.split for question in drawn} == {"train"}
    assert len({question.question_id for question in drawn}) == 5
    assert drawn == training_questions(settings, 5) != training_questions(other, 5)
    assert len(training_questions(settings, 50)) == 9
