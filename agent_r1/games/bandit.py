"""The bandit of two arms, pulled once: the names say which one is the safe one, and which pays more on average.

Names and payments are RAGEN's (arXiv 2504.20073). There the safe arm pays .15 by the paper and .1 by the
code, as here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from agent_r1.games import rules
from agent_r1.games.players import Habits, Play, Player, Turn, at_random, game_of
from agent_r1.games.rules import Start
from agent_r1.params.games import BanditParams

_SAFE_PAYS = 0.1
_RISKY_PAYS = 1.0
_RISKY_CHANCE = 0.25
_LONGEST = 40  # characters of a name

ArmPair = tuple[str, str]  # the arm that surely pays little, then the arm that sometimes pays much, and more on average

TRAIN: tuple[ArmPair, ...] = (
    ("Teacher", "Trader"),
    ("Nurse", "StartupFounder"),
    ("Librarian", "Investor"),
    ("Accountant", "StockBroker"),
    ("Engineer", "RealEstateAgent"),
    ("Pharmacist", "Musician"),
    ("Clerk", "Freelancer"),
    ("Technician", "Youtuber"),
    ("Planner", "Artist"),
    ("Postman", "Pilot"),
    ("Banker", "VentureCapitalist"),
    ("Gardener", "Cryptominer"),
)
TEST: tuple[ArmPair, ...] = (
    ("Receptionist", "Explorer"),
    ("Archivist", "Filmmaker"),
    ("Bookkeeper", "Consultant"),
    ("SocialWorker", "Photographer"),
    ("Mechanic", "GameDesigner"),
    ("Secretary", "Entrepreneur"),
    ("Cashier", "DataScientist"),
    ("CivilServant", "StartupAccelerator"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Board(rules.WrittenBoard):
    """Two arms, in the order in which they are shown."""

    arms: ArmPair
    high: str  # the arm that pays more on average

    def __post_init__(self) -> None:
        two = isinstance(self.arms, tuple) and len(self.arms) == 2
        if not two or str(self.arms[0]).casefold() == str(self.arms[1]).casefold():
            raise ValueError(f"field 'arms' holds two different names; got {self.arms!r}")
        for arm in self.arms:
            if not isinstance(arm, str) or not arm.isalnum() or len(arm) > _LONGEST:
                raise ValueError(f"field 'arms' holds names of up to {_LONGEST} letters and digits; got {arm!r}")
        if self.high not in self.arms:
            raise ValueError(f"field 'high' is one of the arms, {' or '.join(self.arms)}; got {self.high!r}")

    @classmethod
    def draw(cls, seed: int, pairs: Sequence[ArmPair] = TRAIN) -> Self:
        """The board of a seed: one of the pairs, in an order at random."""
        rng = random.Random(seed)
        low, high = rng.choice(pairs)
        return cls(arms=(low, high) if rng.random() < 0.5 else (high, low), high=high)

    @classmethod
    def draw_known(cls, seed: int, *, turned: bool) -> Self:
        """The board of a seed: a training pair in its one order, the safe arm first in every other; or `turned`."""
        number = random.Random(seed).randrange(len(TRAIN))
        low, high = TRAIN[number]
        return cls(arms=(high, low) if turned != bool(number % 2) else (low, high), high=high)


class Game(rules.Game):
    """Two arms, of which one is pulled. The payment of the risky one is drawn from `rng`."""

    def __init__(self, board: Board, rng: random.Random) -> None:
        self.board = board
        self.moves = board.arms
        self._rng = rng
        self.pulled = ""

    @property
    def done(self) -> bool:
        return bool(self.pulled)

    @property
    def won(self) -> bool:
        return self.pulled == self.board.high

    def grid(self) -> list[str]:
        return list(self.board.arms)

    def _make_move(self, move: str) -> float:
        self.pulled = move
        if not self.won:
            return _SAFE_PAYS
        return _RISKY_PAYS if self._rng.random() < _RISKY_CHANCE else 0.0


def best_arm(turn: Turn, rng: random.Random) -> Iterator[Play]:
    """Pulls the arm that pays more on average."""
    yield Play([game_of(turn, Game).board.high])


def demonstrated_arm(habits: Habits) -> Player:
    """Pulls an arm, with a thought that states which one is better; the habit is the safe one."""

    def play(turn: Turn, rng: random.Random) -> Iterator[Play]:
        board = game_of(turn, Game).board
        [low] = {*board.arms} - {board.high}
        arm = low if rng.random() < habits.habit else board.high
        yield Play([arm], f"{low} is safe {board.high} pays more so {arm}")

    return play


def starts(params: BanditParams, split: str, seeds: range) -> Iterator[Start]:
    """The board of each seed."""
    if params.test_pairs == "turned":
        draw = partial(Board.draw_known, turned=split == "test")
    else:
        draw = partial(Board.draw, pairs=TEST if split == "test" else TRAIN)
    for seed in seeds:
        board = draw(seed)
        yield Start(board, f"Bandit, {' or '.join(board.arms)}, seed {seed}")


PLAYERS = {"random": at_random, "oracle": best_arm, "demonstrator": demonstrated_arm(Habits(0.5, 0.0))}
