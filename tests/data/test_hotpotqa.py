"""The HotpotQA release format: rows as they are, and refusals that name file, row and field."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent_r1.data.hotpotqa import load
from agent_r1.params import HotpotParams

SHARED = Path(__file__).parents[2].parent / "shared/data/multihop/hotpotqa"


def row(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "_id": f"id{number}",
        "question": "Who directed Kiss?",
        "answer": "Mara",
        "type": "bridge",
        "level": "easy",
        "supporting_facts": [["Kiss", 0], ["Mara", 0], ["Kiss", 1]],
        "context": [["Kiss", ["A film.", " By Mara."]], ["Mara", ["A director."]], [f"Other {number}", ["x"]]],
        **changes,
    }


def write(folder: Path, train: Any, dev: Any) -> HotpotParams:
    (folder / "train.json").write_text(json.dumps(train))
    (folder / "dev.json.gz").write_bytes(gzip.compress(json.dumps(dev).encode()))
    return HotpotParams(train=folder / "train.json", dev=folder / "dev.json.gz", max_questions=0)


def test_rows_become_questions_and_passages(tmp_path: Path) -> None:
    questions, passages = load(write(tmp_path, [row(1)], [row(2), row(3), row(4, type="comparison", answer="yes")]))
    assert [(q.question_id, q.split, q.kind) for q in questions] == [
        ("id1", "train", "bridge"),
        ("id2", "dev", "bridge"),  # 3 // 2 = 1 dev row, the rest test
        ("id3", "test", "bridge"),
        ("id4", "test", "comparison"),
    ]
    assert questions[0].gold_titles == ["Kiss", "Mara"]  # two, though three sentences are cited
    assert questions[0].hops == 2
    assert questions[3].answers == ["yes"]
    # Kiss and Mara are in every row and come once
    assert [passage.title for passage in passages] == ["Kiss", "Mara", "Other 1", "Other 2", "Other 3", "Other 4"]
    assert passages[0].text == "A film. By Mara."


def test_a_numbered_row_is_taken(tmp_path: Path) -> None:
    questions, _ = load(write(tmp_path, [row(1, _id=37)], [row(2)]))
    assert questions[0].question_id == "37"


def test_one_title_with_two_texts_is_two_passages(tmp_path: Path) -> None:
    other = row(2, context=[["Kiss", ["A band."]], ["Mara", ["A director."]]])
    _, passages = load(write(tmp_path, [row(1)], [other]))
    kisses = [passage for passage in passages if passage.title == "Kiss"]
    assert [passage.text for passage in kisses] == ["A film. By Mara.", "A band."]
    assert kisses[0].passage_id != kisses[1].passage_id


def test_passage_ids_do_not_depend_on_the_other_rows(tmp_path: Path) -> None:
    both = {p.text: p.passage_id for p in load(write(tmp_path, [row(1)], [row(2)]))[1]}
    swapped = {p.text: p.passage_id for p in load(write(tmp_path, [row(2)], [row(3)]))[1]}
    assert both["A director."] == swapped["A director."]


def test_max_questions_counts_per_file(tmp_path: Path) -> None:
    params = write(tmp_path, [row(i) for i in range(5)], [row(i) for i in range(10, 15)])
    questions, _ = load(params.model_copy(update={"max_questions": 2}))
    assert Counter(question.split for question in questions) == {"train": 2, "dev": 1, "test": 1}


def without(field: str) -> dict[str, Any]:
    return {key: value for key, value in row(2).items() if key != field}


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        *((without(field), field) for field in ("_id", "question", "answer", "type", "supporting_facts", "context")),
        (row(2, answer=" "), "answer"),
        (row(2, answer=None), "answer"),
        (row(2, question=7), "question"),
        (row(2, type="riddle"), "type"),
        (row(2, context=[]), "context"),
        (row(2, context=[["Kiss", "A film."]]), "context"),
        (row(2, context=[["Kiss", ["A film."], "x"]]), "context"),
        (row(2, context="Kiss"), "context"),
        (row(2, supporting_facts=[]), "supporting_facts"),
        (row(2, supporting_facts=["Kiss"]), "supporting_facts"),
        (row(2, supporting_facts=[["Elsewhere", 0]]), "supporting_facts"),
        (row(1), "_id"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, bad: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"dev\.json\.gz, row 2: field '{field}'"):
        load(write(tmp_path, [row(9)], [row(1), bad]))


@pytest.mark.parametrize("bad", [7, "text", None, [1]])
def test_a_row_that_is_no_object_is_named(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"train\.json, row 1: expected an object"):
        load(write(tmp_path, [bad], [row(1)]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.json", b'[{"_id": ', "not a JSON file"),
        ("train.json", b"\xff\xfe\x00", "not a JSON file"),
        ("train.json", b"{}", "expected a JSON list"),
        ("train.json", b"[]", "expected a JSON list"),
        ("dev.json.gz", b"[]", "not a whole gzip file"),
        ("dev.json.gz", gzip.compress(b"[]" * 1000)[:-12], "not a whole gzip file"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    params = write(tmp_path, [row(1)], [row(2)])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: {message}"):
        load(params)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    params = write(tmp_path, [row(1)], [row(2)])
    (tmp_path / "train.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.json does not exist; set prepare\.hotpotqa"):
        load(params)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared HotpotQA rows are not here")
def test_real_rows_load_even_those_with_few_paragraphs() -> None:
    params = HotpotParams(
        train=SHARED / "hotpot_train_v1.1.subset.json.gz",
        dev=SHARED / "hotpot_dev_distractor_v1.subset.json.gz",
        max_questions=0,
    )
    questions, passages = load(params)
    assert Counter(question.split for question in questions) == {"train": 300, "dev": 916, "test": 917}
    assert all(question.hops == 2 for question in questions)
    titles = {passage.title for passage in passages}
    assert all(title in titles for question in questions for title in question.gold_titles)
    assert len({passage.passage_id for passage in passages}) == len(passages)
