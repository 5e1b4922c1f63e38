"""The prepare stage: what it writes, and that a failure leaves what was there."""

from __future__ import annotations

import errno
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agent_r1.data.prepare import prepare, write
from agent_r1.data.questions import make_plans
from agent_r1.params import AtlasParams, FilesParams, PrepareParams
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

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full_disk)
    with pytest.raises(OSError, match="No space left"):
        prepare(params.model_copy(update={"seed": 1}), tmp_path)
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == PIECES


def hotpotqa_row(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "_id": f"h{number}",
        "question": "Who directed Kiss?",
        "answer": "Mara",
        "type": "bridge",
        "supporting_facts": [["Kiss", 0], [f"Mara {number}", 0]],
        "context": [["Kiss", ["A film."]], [f"Mara {number}", ["A director."]]],
        **changes,
    }


def from_files(params: PrepareParams, **files: dict[str, Any]) -> PrepareParams:
    """The parameters for exactly these data sets."""
    checked = {name: FilesParams.model_validate(content) for name, content in files.items()}
    return params.model_copy(update={"datasets": list(files), "files": checked})


def split(folder: Path, name: str, rows: list[dict[str, Any]], questions: int = 0) -> dict[str, Any]:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return {"file": folder / name, "questions": questions}


@pytest.fixture
def mixture(params: PrepareParams, tmp_path: Path) -> PrepareParams:
    """Atlas, ten of twelve rows like HotpotQA's, and a data set that is held out and has a corpus."""
    raw = tmp_path / "raw"
    (raw / "corpus").mkdir(parents=True)
    (raw / "corpus/Mara 1.txt").write_text("A director.\n\nShe is tall.")
    (raw / "corpus/more.jsonl").write_text(json.dumps({"id": 7, "title": "Ann", "text": "A person."}))
    own = [{"question": "Who?", "answers": ["Ann", "Anne"], "gold_titles": ["Ann", "Bob"]}]
    mixed = from_files(
        params,
        hotpotqa={
            "format": "hotpotqa",
            "train": split(raw, "train.jsonl", [hotpotqa_row(i) for i in range(12)], questions=10),
        },
        own={"format": "generic", "test": split(raw, "test.jsonl", own), "corpus": raw / "corpus"},
    )
    return mixed.model_copy(update={"datasets": ["atlas", "hotpotqa", "own"]})


def test_data_sets_are_mixed_for_training_and_one_is_held_out(mixture: PrepareParams, tmp_path: Path) -> None:
    write(mixture, tmp_path)
    questions = read_rows(tmp_path / "questions.parquet", Question)
    assert Counter((question.dataset, question.split) for question in questions) == {
        ("atlas", "train"): 200,
        ("atlas", "dev"): 40,
        ("atlas", "test"): 40,
        ("hotpotqa", "train"): 10,
        ("own", "test"): 1,
    }
    places = [at for at, question in enumerate(questions) if question.dataset == "hotpotqa"]
    assert places == [10 + 21 * i for i in range(10)]  # one after every ten of Atlas's 200, then ten more
    assert [question.split for question in questions] == sorted(
        (question.split for question in questions), key=["train", "dev", "test"].index
    )
    assert next(question for question in questions if question.dataset == "own").answers == ["Ann", "Anne"]


def test_passages_are_the_rows_own_the_worlds_and_the_corpora_each_once(
    mixture: PrepareParams, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(mixture, tmp_path)
    passages = read_rows(tmp_path / "passages.parquet", Passage)
    assert len({passage.passage_id for passage in passages}) == len(passages)
    texts = Counter((passage.title, passage.text) for passage in passages)
    assert set(texts.values()) == {1}
    assert len(passages) in (11 + 117 + 2, 11 + 117 + 3)  # "Mara 1" comes with a row, unless that row was not drawn
    assert {("Kiss", "A film."), ("Mara 1", "A director."), ("Mara 1", "She is tall.")} <= set(texts)
    assert next(passage for passage in passages if passage.title == "Ann").passage_id == "7"
    [warning] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == "own: 1 of 2 gold titles, such as 'Bob', are titles of no passage, so no search can find them"


def test_a_corpus_takes_the_place_of_the_rows_own_paragraphs(params: PrepareParams, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "Kiss", "text": "Another film."}))
    test = split(tmp_path, "dev.jsonl", [hotpotqa_row(1)])
    write(
        from_files(params, hotpotqa={"format": "hotpotqa", "test": test, "corpus": tmp_path / "corpus.jsonl"}), tmp_path
    )
    assert [passage.text for passage in read_rows(tmp_path / "passages.parquet", Passage)] == ["Another film."]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([hotpotqa_row(1), hotpotqa_row(1)], r"dev\.jsonl, row 2: the id 'h1' is that of an earlier question"),
        ([hotpotqa_row(1), hotpotqa_row(2, context=[])], r"dev\.jsonl, row 2: field 'context'"),
        (
            [hotpotqa_row(1), {"context": [["Kiss", ["x"]]]}],
            r"dev\.jsonl, row 2: field 'supporting_facts' must hold .* no such field",
        ),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(
    params: PrepareParams, tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    test = split(tmp_path, "dev.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        prepare(from_files(params, hotpotqa={"format": "hotpotqa", "test": test}), tmp_path / "prepared")
    assert list((tmp_path / "prepared").iterdir()) == []


def test_missing_data_writes_nothing(params: PrepareParams, tmp_path: Path) -> None:
    nowhere = {"format": "musique", "test": {"file": tmp_path / "t.jsonl", "questions": 0}}
    with pytest.raises(FileNotFoundError, match=r"t\.jsonl does not exist"):
        prepare(from_files(params, musique=nowhere), tmp_path / "prepared")
    assert list((tmp_path / "prepared").iterdir()) == []


def test_a_corpus_without_passages_is_refused(params: PrepareParams, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    test = split(tmp_path, "dev.jsonl", [{"question": "?", "answer": "x"}])
    own = {"format": "generic", "test": test, "corpus": tmp_path / "empty.txt"}
    with pytest.raises(ValueError, match="no passages to search; check the corpus"):
        prepare(from_files(params, own=own), tmp_path / "prepared")


def test_every_question_has_a_plan(mixture: PrepareParams, tmp_path: Path) -> None:
    write(mixture, tmp_path)
    questions = read_rows(tmp_path / "questions.parquet", Question)
    found, facts = make_plans(mixture, questions)
    assert {question.question_id: question.answers[0] for question in questions} == {
        question_id: plan.answer for question_id, plan in found.items()
    }
    atlas = [question for question in questions if question.dataset == "atlas"]
    assert set(facts) >= {title for question in atlas for title in question.gold_titles}
    real = mixture.model_copy(update={"datasets": ["hotpotqa", "own"]})
    assert make_plans(real, questions[-1:])[1] == {}
