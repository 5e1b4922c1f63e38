"""Passages from rows and from plain text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agent_r1.data.mixture import Distinct, content_id, passages
from agent_r1.records import Passage, Question


def test_rows_keep_their_ids_or_are_named_by_their_content(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": 5, "title": "A", "text": " x \n"}, {"title": "B", "text": "y", "more": 1}]
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    where, found = zip(*passages(tmp_path / "corpus.jsonl.gz"), strict=True)
    assert where == tuple(f"{tmp_path}/corpus.jsonl.gz, row {number}" for number in (1, 2))
    assert found[0] == Passage(passage_id="5", title="A", text="x")
    assert found[1] == Passage(passage_id=content_id("B", "y"), title="B", text="y")


def test_every_paragraph_of_a_text_is_a_passage_of_its_files_name(tmp_path: Path) -> None:
    (tmp_path / "Kiss.txt").write_text("\nA film.\nBy Mara.\n \n\nIt is long.\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/Mara.txt.gz").write_bytes(gzip.compress(b"A director."))
    pq.write_table(pa.table({"title": ["T"], "text": ["z"]}), tmp_path / "more.parquet")
    found = {(where.removeprefix(f"{tmp_path}/"), each.title, each.text) for where, each in passages(tmp_path)}
    assert found == {
        ("Kiss.txt, paragraph 1", "Kiss", "A film.\nBy Mara."),
        ("Kiss.txt, paragraph 2", "Kiss", "It is long."),
        ("deep/Mara.txt.gz, paragraph 1", "Mara", "A director."),
        ("more.parquet, row 1", "T", "z"),
    }


@pytest.mark.parametrize(
    ("row", "field"),
    [({"text": "x"}, "title"), ({"title": "A"}, "text"), ({"id": [], "title": "A", "text": "x"}, "id")],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=rf"corpus\.jsonl, row 1: field '{field}' must be a text"):
        list(passages(tmp_path / "corpus.jsonl"))


def passage(passage_id: str, text: str) -> Passage:
    return Passage(passage_id=passage_id, title="A", text=text)


def test_equal_passages_come_once_whatever_their_ids() -> None:
    distinct = Distinct()
    several = [passage("1", "x"), passage("2", "x"), passage("3", "y"), passage(content_id("A", "x"), "x")]
    assert [distinct.is_new(each, "") for each in several] == [True, False, True, False]


def test_one_id_for_two_passages_or_questions_is_refused() -> None:
    distinct = Distinct()
    distinct.is_new(passage("1", "x"), "a, row 1")
    with pytest.raises(
        ValueError, match=r"^b, row 4: the id '1' is that of an earlier passage with another text; give"
    ):
        distinct.is_new(passage("1", "y"), "b, row 4")
    question = Question(
        question_id="q", dataset="d", split="dev", text="?", answers=["a"], gold_titles=[], hops=1, kind="k"
    )
    distinct.take_question(question, "a, row 1")
    with pytest.raises(ValueError, match=r"^b, row 7: the id 'q' is that of an earlier question; take one"):
        distinct.take_question(question, "b, row 7")
