"""FrozenLake by hand, on the boards of RAGEN's validation, and what chance and the best plans reach there."""

import random
from collections import Counter

import numpy as np
import pytest

from agent_r1.games.lake import Board, Game, Planner
from benchmarks.games import VALIDATION, uniform_on_ice
from tests.cases import cases

# S . H     the way round the hole: Down, Right, Right, Up
# . . G
BENT = Board(rows=("SFH", "FFG"))


def test_a_walk_by_hand() -> None:
    game = Game(BENT, random.Random(0))
    assert game.grid() == ["P_O", "__G"]
    assert game.places() == {"Goal": [(1, 2)], "Player": [(0, 0)], "Holes": [(0, 2)]}
    assert [game.play(move) for move in ("Up", "Left", "Down")] == [0.0, 0.0, 0.0]  # the edge holds
    assert (game.grid(), game.done) == (["__O", "P_G"], False)
    with pytest.raises(ValueError, match=r"no move 'Jump' of Left, Down, Right, Up$"):
        game.play("Jump")
    assert [game.play(move) for move in ("Right", "Right")] == [0.0, 1.0]
    assert (game.done, game.won, game.grid()) == (True, True, ["__O", "__√"])
    lost = Game(BENT, random.Random(0))
    assert [lost.play(move) for move in ("Right", "Right")] == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"no move 'Left' of .* after the end"):
        lost.play("Left")
    assert (lost.done, lost.won, lost.grid()) == (True, False, ["__X", "__G"])


def test_moves_go_astray_to_their_sides_alone() -> None:
    """From the middle of the ice, meant to go Down: never Up, and the three others as often as their chances."""
    middle, rng = Board(rows=("FFFFG", "FFSFF", "FFFFF"), intended=0.5), random.Random(5)
    counts = Counter[tuple[int, int]]()
    for _ in range(4000):
        game = Game(middle, rng)
        game.play("Down")
        counts[game.player] += 1
    assert set(counts) == {(2, 2), (1, 1), (1, 3)}
    assert counts[2, 2] / 4000 == pytest.approx(0.5, abs=0.03)
    assert counts[1, 1] / 4000 == pytest.approx(0.25, abs=0.03)


def test_the_board_of_a_seed_is_the_one_of_those_draws() -> None:
    """Number for number: cells, start, goal, again until they differ and are connected."""
    rng = np.random.Generator(np.random.PCG64(123))
    cells = rng.choice(["F", "H"], (4, 4), p=[0.8, 0.2])
    start, goal = rng.integers(4, size=2), rng.integers(4, size=2)
    cells[tuple(start)], cells[tuple(goal)] = "S", "G"
    assert Board.draw(123).rows == tuple("".join(row) for row in cells)
    assert len({Board.draw(seed).rows for seed in VALIDATION}) == 254  # two boards come twice


def test_what_chance_and_the_best_play_reach_on_the_validation_boards() -> None:
    """Ten moves, chosen uniformly, each best in sight of the board, or five at a time; exact means over 256 boards."""
    boards = [Board.draw(seed, intended=1 / 3) for seed in VALIDATION]
    sighted = [Planner(board, 1).best(board.start, steps=10, moves=10).chance for board in boards]
    planned = [Planner(board, 5).best(board.start, steps=5, moves=10).chance for board in boards]
    chance = [uniform_on_ice(board, 10) for board in boards]
    assert [round(sum(each) / len(boards), 3) for each in (chance, sighted, planned)] == [0.212, 0.483, 0.477]


def test_a_plan_by_hand() -> None:
    """In one step all the moves that it takes, and no more; with too few of them nothing can be done."""
    planner = Planner(BENT, 5)
    assert planner.best((0, 0), steps=1, moves=10) == (1.0, ("Down", "Right", "Right"))
    assert planner.best((0, 0), steps=1, moves=2).chance == 0.0
    assert planner.best((1, 2), steps=0, moves=0) == (1.0, ())
    # From (1, 1) Right reaches the goal with 1/3, and slips to the edge or to (0, 1), from where it is as good as lost.
    slippery = Planner(Board(rows=BENT.rows, intended=1 / 3), 1)
    assert slippery.best((1, 1), steps=1, moves=1).chance == pytest.approx(1 / 3)


@pytest.mark.parametrize("seed", range(8))
def test_every_way_leads_to_the_goal_and_every_board_survives_its_writing(seed: int) -> None:
    board = Board.draw(seed, intended=0.8)
    assert Board.read(board.write()) == board
    game = Game(Board.read(Board.draw(seed).write()), random.Random(0))
    way = board.way(board.start)
    rewards = [game.play(move) for move in way]
    assert rewards == [0.0] * (len(way) - 1) + [1.0]


@cases("setup, problem")
def test_a_lake_that_is_wrong_is_named(setup: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Board.read(setup)
    with pytest.raises(ValueError, match="take at least 2"):
        Board.draw(0, size=1)
