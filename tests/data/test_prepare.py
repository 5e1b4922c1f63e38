"""The prepare stage: what it writes, and that a failure leaves what was there."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from agent_r1.data import prepare as stage
from agent_r1.data.prepare import plans, prepare
from agent_r1.params import AtlasParams, HotpotParams, PrepareParams
from agent_r1.records import Passage, Question
from agent_r1.tables import read_rows

PIECES = ["passages.parquet", "questions.parquet"]


@pytest.fixture
def params(prepare_params: PrepareParams, atlas_params: AtlasParams) -> PrepareParams:
    return prepare_params.model_copy(update={"atlas": atlas_params})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_writes_questions_and_passages(params: PrepareParams, tmp_path: Path) -> None:
    prepare(params, tmp_path / "prepared")
    assert sorted(path.name for path in (tmp_path / "prepared").iterdir()) == PIECES
    questions = read_rows(tmp_path / "prepared/questions.parquet", Question)
    passages = read_rows(tmp_path / "prepared/passages.parquet", Passage)
    assert len(questions) == 280
    assert len(passages) == 61 + 30 + 12 + 10 + 4
    titles = {passage.title for passage in passages}
    assert all(title in titles for question in questions for title in question.gold_titles)


def test_the_same_seed_gives_the_same_bytes_and_files_of_others_stay(params: PrepareParams, tmp_path: Path) -> None:
    prepare(params, tmp_path)
    (tmp_path / ".gitignore").write_text("/passages.parquet\n")
    first = contents(tmp_path)
    prepare(params, tmp_path)
    assert contents(tmp_path) == first
    prepare(params.model_copy(update={"seed": 1}), tmp_path)
    assert contents(tmp_path)["questions.parquet"] != first["questions.parquet"]


def test_a_full_disk_leaves_what_was_there(
    params: PrepareParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(params, tmp_path)
    before = contents(tmp_path)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stage, "write_rows", full_disk)
    with pytest.raises(OSError, match="No space left"):
        prepare(params.model_copy(update={"seed": 1}), tmp_path)
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == PIECES


def test_missing_data_writes_nothing(params: PrepareParams, tmp_path: Path) -> None:
    nowhere = HotpotParams(train=tmp_path / "t.json", dev=tmp_path / "d.json", max_questions=0)
    with pytest.raises(FileNotFoundError, match=r"t\.json does not exist"):
        prepare(params.model_copy(update={"dataset": "hotpotqa", "hotpotqa": nowhere}), tmp_path / "prepared")
    assert not (tmp_path / "prepared").exists()


def test_every_question_has_a_plan(params: PrepareParams) -> None:
    questions, _ = stage.load(params)
    found, facts = plans(params, questions)
    assert {question.question_id: question.answers[0] for question in questions} == {
        question_id: plan.answer for question_id, plan in found.items()
    }
    assert set(facts) >= {title for question in questions for title in question.gold_titles}
    real, nothing = plans(params.model_copy(update={"dataset": "hotpotqa"}), questions[:3])
    assert list(real) == [question.question_id for question in questions[:3]]
    assert nothing == {}
