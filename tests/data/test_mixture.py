"""How many questions a split gets of each data set, and in which order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.data.mixture import FORMATS, Portion, from_files, interleave
from agent_r1.params import FilesParams, SplitParams


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
