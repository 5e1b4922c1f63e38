"""How many questions a split gets of each data set, in which order, and passages from rows and from plain text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.data.formats import FORMATS
from agent_r1.data.mixture import Distinct, Portion, content_id, from_files, interleave, read_passages
from agent_r1.params import FilesParams, SplitParams
from agent_r1.records import Passage, Question


def files(folder: Path, rows: int, questions: int) -> FilesParams:
    lines = [json.dumps({"id": i, "question": f"{i}?", "answer": "x"}) for i in range(rows)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    split = SplitParams(file=folder / "train.jsonl", questions=questions)
    return FilesParams(format="generic", train=split, corpus=folder)


def drawn(params: FilesParams, seed: int = 0, name: str = "own") -> list[int]:
    portion = from_files(name, params, "train", seed)
    ids = [int(entry.question.question_id) for entry in portion.items]
    assert portion.size == len(ids)
    return ids


def test_all_rows_are_taken_in_their_order(tmp_path: Path) -> None:
    assert drawn(files(tmp_path, rows=50, questions=0)) == list(range(50))
    assert drawn(files(tmp_path, rows=50, questions=50)) == list(range(50))


def test_the_seed_and_the_name_draw_a_part(tmp_path: Path) -> None:
    params = files(tmp_path, rows=50, questions=10)
    first = drawn(params)
    assert first == drawn(params) == sorted(set(first))
    assert len(first) == 10
    assert first != drawn(params, seed=1)
    assert first != drawn(params, name="other")


def test_every_row_is_as_likely_as_another(tmp_path: Path) -> None:
    params = files(tmp_path, rows=10, questions=3)
    times = [sum(row in drawn(params, seed) for seed in range(300)) for row in range(10)]
    assert all(60 <= each <= 120 for each in times)  # 90 expected, standard deviation 8


def test_more_questions_than_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"train\.jsonl holds 5 rows; prepare\.files\.own\.train\.questions asks for 6"
    ):
        drawn(files(tmp_path, rows=5, questions=6))


def test_a_mixture_by_hand() -> None:
    # Of 4: at 1/8, 3/8, 5/8, 7/8 of the way; of 2: at 1/4 and 3/4.
    assert "".join(interleave([Portion(4, "aaaa"), Portion(2, "bb")])) == "abaaba"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_every_data_set_keeps_its_share_and_order(sizes: list[int]) -> None:
    mixed = list(interleave([Portion(size, [(which, i) for i in range(size)]) for which, size in enumerate(sizes)]))
    assert len(mixed) == sum(sizes)
    for which, size in enumerate(sizes):
        places = [at for at, (owner, _) in enumerate(mixed) if owner == which]
        assert [mixed[at][1] for at in places] == list(range(size))
        for taken, at in enumerate(places):  # never ahead or behind by more than one of each other
            assert abs(taken - at * size / len(mixed)) <= len(sizes)


def test_every_format_that_params_allow_can_be_read() -> None:
    allowed = FilesParams.model_fields["format"].annotation
    assert set(FORMATS) == set(allowed.__args__)  # type: ignore[union-attr]


def test_rows_keep_their_ids_or_are_named_by_their_content(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": 5, "title": "A", "text": " x \n"}, {"title": "B", "text": "y", "more": 1}]
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    where, found = zip(*read_passages(tmp_path / "corpus.jsonl.gz"), strict=True)
    assert where == tuple(f"{tmp_path}/corpus.jsonl.gz, row {number}" for number in (1, 2))
    assert found[0] == Passage(passage_id="5", title="A", text="x")
    assert found[1] == Passage(passage_id=content_id("B", "y"), title="B", text="y")


def test_every_paragraph_of_a_text_is_a_passage_of_its_files_name(tmp_path: Path) -> None:
    (tmp_path / "Kiss.txt").write_text("\nA film.\nBy Mara.\n \n\nIt is long.\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/Mara.txt.gz").write_bytes(gzip.compress(b"A director."))
    pq.write_table(pa.table({"title": ["T"], "text": ["z"]}), tmp_path / "more.parquet")
    found = {(where.removeprefix(f"{tmp_path}/"), each.title, each.text) for where, each in read_passages(tmp_path)}
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
        list(read_passages(tmp_path / "corpus.jsonl"))


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
