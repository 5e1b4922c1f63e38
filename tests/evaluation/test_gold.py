"""The passages under a question's gold titles."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from agent_r1.evaluation.predictions import gold_passages
from agent_r1.records import Passage
from agent_r1.tables import write_rows


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    titles = ["Tesk", "Veld", "Low Tide", "Veld"]
    rows = [Passage(passage_id=str(i), title=title, text=f"Text {i}.") for i, title in enumerate(titles)]
    write_rows(tmp_path / "passages.parquet", rows, Passage)
    return tmp_path / "passages.parquet"


def test_in_the_order_of_the_titles_and_all_of_a_title(passages: Path, make_question: Any) -> None:
    two = dataclasses.replace(make_question("two"), gold_titles=["Veld", "Tesk", "Veld"])
    found = gold_passages([two], passages)
    assert {name: [row.passage_id for row in rows] for name, rows in found.items()} == {"two": ["1", "3", "0"]}


def test_questions_without_all_their_gold_are_left_out_with_a_word(
    passages: Path, make_question: Any, caplog: pytest.LogCaptureFixture
) -> None:
    known, none, missing = (
        dataclasses.replace(make_question(name), gold_titles=titles)
        for name, titles in (("known", ["Tesk"]), ("none", []), ("missing", ["Tesk", "Nowhere"]))
    )
    with caplog.at_level(logging.WARNING):
        assert list(gold_passages([known, none, missing], passages)) == ["known"]
    assert "left out 2 of 3 questions: no gold passages" in caplog.text
    with pytest.raises(ValueError, match="none of the 2 questions has gold passages: give them gold_titles"):
        gold_passages([none, missing], passages)
