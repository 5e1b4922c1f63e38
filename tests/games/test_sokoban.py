"""Sokoban by hand, and what chance reaches on boards drawn to the lengths of RAGEN's."""

import random
from collections import Counter

import pytest

from agent_r1.games import sokoban
from agent_r1.games.sokoban import RAGEN_LENGTHS, Board, Game, RoomState
from benchmarks.games import uniform_in_sokoban
from tests.cases import cases

LINE = Board(rows=("######", "#PX_O#", "######"))
TWO = Board(rows=("#####", "#O√P#", "#X__#", "#####"))


def test_a_box_is_pushed_by_hand() -> None:
    game = Game(LINE, random.Random(0))
    assert [round(game.play(move), 1) for move in ("Left", "Up", "Right")] == [-0.1, -0.1, -0.1]
    assert game.grid() == ["######", "#_PXO#", "######"]
    places = game.places()
    assert places.pop("Walls") == [(y, x) for y in range(3) for x in range(6) if y != 1 or x in (0, 5)]
    assert places == {"Targets": [(1, 4)], "Boxes": [(1, 3)], "Player": [(1, 2)]}
    assert round(game.play("Right"), 1) == 10.9
    assert (game.done, game.won, game.grid()) == (True, True, ["######", "#__P√#", "######"])
    with pytest.raises(ValueError, match=r"no move 'Left' of .* after the end"):
        game.play("Left")
    assert game.state == RoomState((1, 3), frozenset({(1, 4)}))


def test_two_boxes_by_hand() -> None:
    """The first is pushed off its target and onto the other; then the player stands on the one that is free again."""
    game = Game(TWO, random.Random(0))
    assert round(game.play("Left"), 1) == -0.1  # off the one and onto the other
    assert game.grid() == ["#####", "#√S_#", "#X__#", "#####"]
    off = Game(Board(rows=("#####", "#P√_#", "#_OX#", "#####")))
    assert round(off.play("Right"), 1) == -1.1
    pair = Game(Board(rows=("#######", "#PXXOO#", "#######")))
    assert round(pair.play("Right"), 1) == -0.1
    assert pair.grid()[1] == "#PXXOO#"  # two boxes in a row do not move
    with pytest.raises(ValueError, match=r"no move 'up' of Up, Down, Left, Right$"):
        pair.play("up")


@pytest.mark.parametrize("seed", range(6))
def test_every_plan_wins_in_the_fewest_moves(seed: int) -> None:
    board = Board.draw(seed)
    assert Board.read(board.write()) == board
    plan, game = board.solve(board.start, 10), Game(board)
    rewards = [game.play(move) for move in plan]
    assert (game.won, round(sum(rewards), 6)) == (True, round(11 - 0.1 * len(plan), 6))
    assert board.solve(board.start, len(plan) - 1) is None


def test_what_chance_reaches_on_boards_drawn_to_lengths() -> None:
    """Exactly, with ten uniform moves. RAGEN's own levels give .186: they are easier at equal length."""
    boards = Board.drawn_to(123, RAGEN_LENGTHS)
    assert Board.drawn_to(7, {2: 2, 5: 1}) == Board.drawn_to(7, {2: 2, 5: 1}) != Board.drawn_to(8, {2: 2, 5: 1})
    assert Counter(len(board.solve(board.start, 10) or ()) for board in boards) == RAGEN_LENGTHS
    assert len({*boards}) == sum(RAGEN_LENGTHS.values()) == 256
    assert round(sum(map(uniform_in_sokoban, boards)) / len(boards), 3) == 0.142


def test_boards_that_there_are_not_are_not_looked_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """On three by three cells one push solves twelve: three rows and columns, both ways."""
    assert len({*Board.drawn_to(0, {1: 12}, size=5, walls=0.0)}) == 12
    monkeypatch.setattr(sokoban, "_MOST_IN_VAIN", 100)
    with pytest.raises(ValueError, match="no further boards are found that take 1 moves"):
        Board.drawn_to(0, {1: 13}, size=5, walls=0.0)


@cases("rows, problem")
def test_a_setup_that_is_wrong_is_named(rows: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Board.read(f'{{"rows": {rows}}}')
    with pytest.raises(ValueError, match="take at least 5"):
        Board.draw(0, size=4)
