"""The bandit by hand: what its arms pay, and how often."""

import random

import pytest

from agent_r1.games.bandit import TEST, TRAIN, Board, Game
from tests.cases import cases

BOARD = Board(arms=("Phoenix", "Dragon"), high="Dragon")


def test_one_arm_is_pulled() -> None:
    safe = Game(BOARD, random.Random(0))
    assert (safe.moves, safe.done, safe.won) == (("Phoenix", "Dragon"), False, False)
    with pytest.raises(ValueError, match="no move 'Trader'"):
        safe.play("Trader")
    assert safe.play("Phoenix") == 0.1
    assert (safe.done, safe.won) == (True, False)
    with pytest.raises(ValueError, match="after the end"):
        safe.play("Dragon")
    assert safe.pulled == "Phoenix"
    rng, paid = random.Random(1), []
    for _ in range(2000):
        risky = Game(BOARD, rng)
        paid.append(risky.play("Dragon"))
        assert risky.won
    assert set(paid) == {0.0, 1.0}
    assert sum(paid) / 2000 == pytest.approx(0.25, abs=0.03)


def test_boards_show_every_pair_in_both_orders_and_no_test_pair_in_training() -> None:
    drawn = {Board.draw(seed) for seed in range(400)}
    assert len(drawn) == 2 * len(TRAIN) == 24
    assert len({Board.draw(seed, TEST).arms for seed in range(300)}) == 2 * len(TEST) == 16
    assert not {name for pair in TRAIN for name in pair} & {name for pair in TEST for name in pair}
    assert all(Board.read(board.write()) == board for board in drawn)
    assert all(
        (board.arms[0] if board.high == board.arms[1] else board.arms[1], board.high) in TRAIN for board in drawn
    )


@cases("arms, high, problem")
def test_a_bandit_that_is_wrong_is_named(arms: str, high: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Board.read(f'{{"arms": {arms}, "high": {high}}}')
