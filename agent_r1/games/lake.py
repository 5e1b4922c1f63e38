"""FrozenLake: from the start over the ice to the goal, past the holes; where the ice is slippery, moves go astray.

Boards are drawn as RAGEN (arXiv 2504.20073) draws them, number for number, and the ice is gymnasium's: a move goes
where it was meant to with the chance `intended`, and else to one of its two sides.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Self

import numpy as np

from agent_r1.games import rules
from agent_r1.games.players import Habits, Play, Turn, at_random, away, demonstrator, game_of, straight
from agent_r1.games.rules import Cell, Start, fewest_moves, found, just_one, require_rows
from agent_r1.params.games import LakeParams
from agent_r1.records import Floats, Int64s

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}  # in a circle: a move's sides are beside it
_ICE, _HOLE, _START, _GOAL = "FHSG"
_DECIMALS = 12  # to which chances of success are compared
_MOST_AT_ONCE = 6

Chances = Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Board(rules.WrittenBoard):
    """A lake before the first move."""

    rows: tuple[str, ...]  # of F ice, H hole, S start, G goal
    intended: float = 1.0  # chance that a move goes where it was meant to

    def __post_init__(self) -> None:
        require_rows(self.rows, _ICE + _HOLE + _START + _GOAL)
        just_one(self.rows, _START, "start")
        just_one(self.rows, _GOAL, "goal")
        if isinstance(self.intended, bool) or not isinstance(self.intended, int | float) or not 0 < self.intended <= 1:
            raise ValueError(f"field 'intended' is a chance above 0 and at most 1; got {self.intended!r}")

    @classmethod
    def draw(cls, seed: int, *, size: int = 4, frozen: float = 0.8, intended: float = 1.0) -> Self:
        """The board of a seed; each cell is ice with the chance `frozen`, and a way leads to the goal."""
        if size < 2:
            raise ValueError(f"a board of size {size} has no room for a start and a goal; take at least 2")
        rng = np.random.Generator(np.random.PCG64(seed))
        while True:
            cells = rng.choice([_ICE, _HOLE], (size, size), p=[frozen, 1 - frozen])
            start, goal = (tuple(rng.integers(size, size=2).tolist()) for _ in range(2))
            if start == goal:
                continue
            cells[start] = _START
            cells[goal] = _GOAL
            board = cls(rows=tuple("".join(row) for row in cells), intended=intended)
            if board.way(board.start):
                return board

    @property
    def start(self) -> Cell:
        return just_one(self.rows, _START, "start")

    @property
    def goal(self) -> Cell:
        return just_one(self.rows, _GOAL, "goal")

    def cell(self, place: Cell) -> str:
        return self.rows[place[0]][place[1]]

    def after(self, place: Cell, move: str) -> Cell:
        """The cell to which a move leads if it does not go astray; at the edge it leads nowhere."""
        y = place[0] + MOVES[move][0]
        x = place[1] + MOVES[move][1]
        return (y, x) if 0 <= y < len(self.rows) and 0 <= x < len(self.rows[0]) else place

    def way(self, place: Cell) -> list[str] | None:
        """The fewest moves past the holes to the goal, if none goes astray; None if there is no way."""
        goal = self.goal

        def past_holes(cell: Cell, move: str) -> Cell | None:
            target = self.after(cell, move)
            return None if self.cell(target) == _HOLE else target

        return fewest_moves(place, lambda cell: cell == goal, past_holes, MOVES)


class Game(rules.Game):
    """A lake that is walked on. Chance comes from `rng`, one number for each move where moves may go astray."""

    moves = tuple(MOVES)

    def __init__(self, board: Board, rng: random.Random) -> None:
        self.board = board
        self.player = board.start
        self._rng = rng

    @property
    def done(self) -> bool:
        return self.board.cell(self.player) in _HOLE + _GOAL

    @property
    def won(self) -> bool:
        return self.player == self.board.goal

    def grid(self) -> list[str]:
        """The rows with P player, _ ice, O hole, G goal, X player in a hole, √ player at the goal."""
        rows = [[{_HOLE: "O", _GOAL: "G"}.get(cell, "_") for cell in row] for row in self.board.rows]
        y, x = self.player
        rows[y][x] = {_HOLE: "X", _GOAL: "√"}.get(self.board.cell(self.player), "P")
        return ["".join(row) for row in rows]

    def places(self) -> dict[str, list[Cell]]:
        return {"Goal": [self.board.goal], "Player": [self.player], "Holes": found(self.board.rows, _HOLE)}

    def _make_move(self, move: str) -> float:
        intended = self.board.intended
        if intended < 1:
            draw = self._rng.random()
            if draw >= intended:
                move = _sides(move)[draw < (1 + intended) / 2]
        self.player = self.board.after(self.player, move)
        return float(self.won)


def _sides(move: str) -> tuple[str, str]:
    names = tuple(MOVES)
    at = names.index(move)
    return names[at - 1], names[(at + 1) % len(names)]


class Best(NamedTuple):
    """The best that can be done."""

    chance: float  # of reaching the goal
    moves: tuple[str, ...]  # to be made now, without looking in between


class Planner:
    """The best play on a board where up to six moves at a time (5,460 plans) are made without looking in between."""

    def __init__(self, board: Board, moves_per_step: int) -> None:
        self._across = len(board.rows[0])
        self._lengths = range(1, min(moves_per_step, _MOST_AT_ONCE) + 1)
        self._plans = [plan for length in self._lengths for plan in product(MOVES, repeat=length)]
        self._leads = _transitions(board)  # [moves, cells, cells]
        self._at_goal = np.zeros(self._leads.shape[1])  # [cells]
        self._at_goal[self._number(board.goal)] = 1
        self._solutions: dict[tuple[int, int], tuple[Chances, Int64s]] = {}

    def best(self, place: Cell, steps: int, moves: int) -> Best:
        """The best with so many steps left, and so many moves in all; among equals the plan with the fewest moves."""
        chances, plans = self._solve(steps, moves)
        at = self._number(place)
        return Best(float(chances[at]), self._plans[plans[at]] if steps and moves else ())

    def _number(self, place: Cell) -> int:
        return place[0] * self._across + place[1]

    def _solve(self, steps: int, moves: int) -> tuple[Chances, Int64s]:
        """The chance from every cell and the number of its best plan, [cells] each."""
        if not steps or not moves:
            return self._at_goal, np.zeros(len(self._at_goal), np.int64)
        if (steps, moves) not in self._solutions:
            onward = {length: self._solve(steps - 1, moves - length)[0] for length in self._lengths if length <= moves}
            chances = np.concatenate([self._of(length, onward[length]) for length in onward])  # [plans, cells]
            best = chances.round(_DECIMALS).argmax(axis=0)  # of equals the first, and that is the shortest
            self._solutions[steps, moves] = np.take_along_axis(chances, best[None], axis=0)[0], best
        return self._solutions[steps, moves]

    def _of(self, length: int, onward: Chances) -> Chances:
        """The chances of all plans of a length [4 ** length, cells] by those `onward` [cells], last moves first."""
        chances = onward[None, :]
        for _ in range(length):
            chances = (chances @ self._leads.transpose(0, 2, 1)).reshape(-1, len(onward))
        return chances


def _transitions(board: Board) -> Chances:
    """The chance of getting from one cell to another, by move; from a hole and from the goal nothing leads away."""
    across = len(board.rows[0])
    cells = len(board.rows) * across
    leads = np.zeros((len(MOVES), cells, cells))
    for number, move in enumerate(MOVES):
        turns = [(board.intended, move), *(((1 - board.intended) / 2, side) for side in _sides(move))]
        for place in product(range(len(board.rows)), range(across)):
            for chance, turn in turns:
                to = place if board.cell(place) in _HOLE + _GOAL else board.after(place, turn)
                leads[number, place[0] * across + place[1], to[0] * across + to[1]] += chance
    return leads


class Ice:
    """A lake as a demonstrator sees it: the distance of the goal, and the cells around.

    The habit is to go straight to the goal, holes or not. `plan` and `after` hold if no move goes astray.
    """

    moves = tuple(MOVES)

    def __init__(self, turn: Turn) -> None:
        self._game = game_of(turn, Game)
        self._board = self._game.board

    def state(self) -> Cell:
        return self._game.player

    def facts(self, state: Cell) -> str:
        around = " ".join(f"{move} {self._beside(state, move)}" for move in self.moves)
        return f"goal {away(state, self._board.goal)} . {around}"

    def plan(self, state: Cell) -> list[str]:
        return self._board.way(state) or []

    def habit(self, state: Cell) -> str:
        return straight(state, self._board.goal)

    def after(self, state: Cell, move: str) -> Cell:
        return self._board.after(state, move)

    def over(self, state: Cell) -> bool:
        return self._board.cell(state) in "HG"

    def _beside(self, state: Cell, move: str) -> str:
        cell = self._board.after(state, move)
        return "edge" if cell == state else {"H": "hole", "G": "goal"}.get(self._board.cell(cell), "ice")


def best_walk(turn: Turn, rng: random.Random) -> Iterator[Play]:
    """The moves with the best chance of the goal, in sight of the ice's chances but not of its draws."""
    game = game_of(turn, Game)
    planner = Planner(game.board, turn.moves_per_step)
    while True:
        way = game.board.way(game.player) if game.board.intended == 1 else None
        moves = way or planner.best(game.player, turn.steps_left, turn.moves_left).moves
        yield Play(moves[: turn.moves_per_step])


def starts(params: LakeParams, split: str, seeds: range) -> Iterator[Start]:
    """The board of each seed."""
    for seed in seeds:
        board = Board.draw(seed, size=params.size, frozen=params.frozen, intended=params.intended)
        text = f"FrozenLake, {params.size} by {params.size}, seed {seed}"
        yield Start(board, text, len(board.way(board.start) or []))


PLAYERS = {"random": at_random, "oracle": best_walk, "demonstrator": demonstrator(Ice, Habits(0.5, 0.05))}
