"""Boards and starts as rows of data: drawn by seeds, told apart by their solutions, in one split each."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent_r1.data.prepare import prepare
from agent_r1.data.worlds import draw
from agent_r1.games import bandit, lake, sokoban
from agent_r1.params import load
from agent_r1.params.games import BanditParams, LakeParams, SokobanParams
from agent_r1.params.outside import OthersParams
from agent_r1.params.prepare import PrepareParams
from agent_r1.params.sections import override, validated
from agent_r1.records import Passage, Question
from agent_r1.tables import read_rows
from tests.cases import cases

LAKE: dict[str, Any] = {"env": "frozen_lake", "size": 4, "frozen": 0.8, "intended": 1.0}
ROOM: dict[str, Any] = {"env": "sokoban", "size": 6, "walls": 0.12, "most_moves": 10}


def checked(**changes: Any) -> PrepareParams:
    shipped = load(Path(__file__).parents[2] / "params.yaml").prepare.model_dump(mode="json")
    return validated(PrepareParams, override(shipped, changes), "prepare")


def test_a_board_is_a_question_with_all_that_it_starts_from() -> None:
    drawn = draw("ice", LakeParams(**LAKE, train=[5, 7], test=[123, 125]))
    assert [each.question_id for each in drawn["test"]] == ["ice-test-123", "ice-test-124"]
    [first, _] = drawn["test"]
    board = lake.Board.read(first.setup)
    assert board == lake.Board.draw(123)
    assert (first.env, first.dataset, first.answers) == ("frozen_lake", "ice", [])
    assert first.text == "FrozenLake, 4 by 4, seed 123"
    assert len(board.way(board.start) or []) in (4, 5, 6)
    assert first.strata == {"solution": "4-6"}


def test_no_board_is_in_two_splits(caplog: pytest.LogCaptureFixture) -> None:
    """There are so few 3 by 3 boards that seeds draw the same ones again."""
    with caplog.at_level(logging.INFO, logger="agent_r1.data.worlds"):
        drawn = draw("ice", LakeParams(**LAKE | {"size": 3}, train=[0, 400], dev=[400, 500], test=[500, 600]))
    splits = [{each.setup for each in drawn[split]} for split in ("train", "dev", "test")]
    assert not splits[0] & splits[1]
    assert not (splits[0] | splits[1]) & splits[2]
    assert (len(drawn["test"]), len(drawn["train"]) < 400) == (100, True)
    assert f"{400 - len(drawn['train'])} of the train rows are in another split too" in caplog.text
    with pytest.raises(ValueError, match=r"prepare\.worlds\.ice\.train: every row .* make boards larger"):
        draw("ice", LakeParams(**LAKE, train=[5, 6], test=[5, 6]))


def test_rooms_of_the_test_have_solutions_of_the_lengths_that_are_asked_for() -> None:
    drawn = draw("room", SokobanParams(**ROOM, train=[0, 3], test=[123, 129], test_lengths={1: 3, 4: 2, 7: 1}))
    boards = [sokoban.Board.read(each.setup) for each in drawn["test"]]
    assert Counter(len(board.solve(board.start, 10) or []) for board in boards) == {1: 3, 4: 2, 7: 1}
    assert Counter(each.strata["solution"] for each in drawn["test"]) == {"1-3": 3, "4-6": 2, "7 or more": 1}


def test_pairs_that_are_turned_stand_in_the_other_order_in_the_test_and_say_nothing_by_it() -> None:
    drawn = draw("arms", BanditParams(env="bandit", test_pairs="turned", train=[0, 200], test=[0, 200]))
    boards = {split: {bandit.Board.read(each.setup) for each in drawn[split]} for split in ("train", "test")}
    assert {board.arms for board in boards["train"]} == {board.arms[::-1] for board in boards["test"]}
    assert len(boards["train"]) == len(bandit.TRAIN)
    assert sum(board.arms[0] == board.high for board in boards["test"]) == len(bandit.TRAIN) / 2


FILED = {"n": 8, "question": "Eight?", "answer": 8}


@cases("given, key, content")
def test_row_holds_the_beginning_of_its_world(given: dict[str, Any], key: str, content: Any, tmp_path: Path) -> None:
    rows = [{"n": n} for n in range(7)] + [FILED]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = {"file": tmp_path / "rows.jsonl"} if "file" in given else {}
    row = draw("others", OthersParams(**given | file, name="ice", test=[6, 8]))["test"][-1]
    assert json.loads(row.setup) == {"name": "ice", key: content}
    assert (row.text, row.answers) == (("Eight?", ["8"]) if file else ("ice, seed 7", []))


def test_an_agent_outside_is_named_by_its_rows_and_told_no_answer(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "Mend it.", "repository": "r", "answers": ["done"]}))
    params = OthersParams(env="agent", name="coder", test=[0, 1])
    [drawn] = draw("tasks", params)["test"]
    assert (drawn.env, drawn.text, json.loads(drawn.setup)) == ("coder", "coder, seed 0", {"seed": 0})
    [row] = draw("tasks", params.model_copy(update={"file": tmp_path / "rows.jsonl"}))["test"]
    assert (row.env, row.text, row.answers) == ("coder", "Mend it.", ["done"])
    assert json.loads(row.setup) == {"question": "Mend it.", "repository": "r"}


def test_a_task_is_a_text_or_one_message_and_rows_are_there(tmp_path: Path) -> None:
    said = {"role": "user", "content": "Count."}
    prompts: list[Any] = ["Count.", [said], [{"role": "system", "content": "Be brief."}, said]]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    params = OthersParams(env="toolbox", name="w", file=tmp_path / "rows.jsonl", train=[0, 2])
    assert [each.text for each in draw("w", params)["train"]] == ["Count."] * 2
    for test, message in (
        ([2, 3], r"row 3: field 'prompt' must be a text or one message of the user; put others into env\.instructions"),
        ([2, 4], r"rows\.jsonl ends before row 4, and test is \[2, 4\]; lower it"),
    ):
        with pytest.raises(ValueError, match=message):
            draw("w", params.model_copy(update={"test": test}))


def test_worlds_are_prepared_beside_questions_and_alone(tmp_path: Path) -> None:
    """Without a data set that asks there is nothing to search, and that is no fault."""
    worlds = {"ice": {**LAKE, "train": [0, 4], "test": [4, 6]}}
    prepare(checked(datasets=["ice"], worlds=worlds), tmp_path)
    found = read_rows(tmp_path / "questions.parquet", Question)
    assert [each.split for each in found] == ["train"] * 4 + ["test"] * 2
    assert read_rows(tmp_path / "passages.parquet", Passage) == []
    prepare(checked(datasets=["atlas", "ice"], worlds=worlds), tmp_path)
    kinds = Counter(each.env for each in read_rows(tmp_path / "questions.parquet", Question))
    assert kinds == {"qa": 6700, "frozen_lake": 6}


@cases("world, message")
def test_rules_that_draw_nothing_are_refused(world: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(worlds={"mine": world})
