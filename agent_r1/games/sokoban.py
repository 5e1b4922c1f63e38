"""Sokoban: every box is pushed onto a target. A box is pushed by walking against it, and cannot be pulled.

Rewards are those of gym-sokoban. The boards are our own: walls at random within a border, if they can be solved.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

from agent_r1.games import rules
from agent_r1.games.players import Habits, Play, Turn, at_random, away, demonstrator, game_of, straight
from agent_r1.games.rules import Cell, Start, fewest_moves, found, just_one, require_rows
from agent_r1.params.games import SokobanParams

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
_CELLS = "#_OX√PS"  # wall, floor, target, box, box on a target, player, player on a target
_TARGETS = "O√S"
_BOXES = "X√"
_PLAYERS = "PS"
_MOST_IN_VAIN = 3000  # boards in a row, of which none is wanted
_MOVE = -0.1  # reward of each move
_ON = 1.0  # where a box gets onto a target
_OFF = -1.0  # where one leaves it
_SOLVED = 10.0  # where the last box is on a target

# How many of RAGEN's 256 validation levels (arXiv 2504.20073, seeds 123 to 378) need so many moves at best.
RAGEN_LENGTHS = {1: 28, 2: 60, 3: 27, 4: 47, 5: 37, 6: 24, 7: 12, 8: 14, 9: 2, 10: 5}


class RoomState(NamedTuple):
    """The parts of a board that move."""

    player: Cell
    boxes: frozenset[Cell]


@dataclass(frozen=True, kw_only=True, slots=True)
class Board(rules.WrittenBoard):
    """A room before the first move."""

    rows: tuple[str, ...]

    def __post_init__(self) -> None:
        require_rows(self.rows, _CELLS)
        just_one(self.rows, _PLAYERS, "player")
        boxes = len(found(self.rows, _BOXES))
        targets = len(self.targets)
        if not boxes or boxes != targets:
            raise ValueError(f"field 'rows' has {boxes} boxes and {targets} targets; they are as many, and not none")

    @classmethod
    def draw(cls, seed: int, *, size: int = 6, walls: float = 0.12, most_moves: int = 10) -> Self:
        """The board of a seed, with one box: the first that is drawn and can be solved in at most so many moves."""
        return next(cls.drawn(random.Random(seed), size=size, walls=walls, most_moves=most_moves))[0]

    @classmethod
    def drawn(
        cls, rng: random.Random, *, size: int = 6, walls: float = 0.12, most_moves: int = 10
    ) -> Iterator[tuple[Self, int]]:
        """Boards without end, and the fewest moves that solve each."""
        if size < 5:
            raise ValueError(f"a board of size {size} has no room within its border; take at least 5")
        while True:
            rows = [["#"] * size for _ in range(size)]
            for y in range(1, size - 1):
                for x in range(1, size - 1):
                    rows[y][x] = "#" if rng.random() < walls else "_"
            floor = found(["".join(row) for row in rows], "_")
            if len(floor) < 3:
                continue
            for (y, x), cell in zip(rng.sample(floor, 3), "OXP", strict=True):
                rows[y][x] = cell
            board = cls(rows=tuple("".join(row) for row in rows))
            if plan := board.solve(board.start, most_moves):
                yield board, len(plan)

    @classmethod
    def drawn_to(cls, seed: int, lengths: Mapping[int, int], *, size: int = 6, walls: float = 0.12) -> list[Self]:
        """Different boards, as many of each length of the best solution as asked; ValueError if there are too few."""
        missing = Counter(lengths)
        boards = dict[Self, None]()
        in_vain = 0
        drawn = cls.drawn(random.Random(seed), size=size, walls=walls, most_moves=max(lengths))
        while +missing:
            board, length = next(drawn)
            in_vain += 1
            if missing[length] > 0 and board not in boards:
                missing[length] -= 1
                boards[board] = None
                in_vain = 0
            if in_vain == _MOST_IN_VAIN:
                raise ValueError(f"no further boards are found that take {', '.join(map(str, +missing))} moves")
        return list(boards)

    @property
    def targets(self) -> frozenset[Cell]:
        return frozenset(found(self.rows, _TARGETS))

    @property
    def start(self) -> RoomState:
        return RoomState(just_one(self.rows, _PLAYERS, "player"), frozenset(found(self.rows, _BOXES)))

    def wall(self, place: Cell) -> bool:
        """Whether a cell is a wall, or beyond the board."""
        y, x = place
        return not (0 <= y < len(self.rows) and 0 <= x < len(self.rows[0])) or self.rows[y][x] == "#"

    def after(self, state: RoomState, move: str) -> RoomState:
        """The state after a move; against a wall, or a box that has no room, nothing moves."""
        to = beside(state.player, move)
        if self.wall(to):
            return state
        if to not in state.boxes:
            return RoomState(to, state.boxes)
        beyond = beside(to, move)
        if self.wall(beyond) or beyond in state.boxes:
            return state
        return RoomState(to, state.boxes - {to} | {beyond})

    def solve(self, state: RoomState, most_moves: int) -> list[str] | None:
        """The fewest moves that solve the room, in breadth-first order; None if that takes more than `most_moves`."""
        targets = self.targets
        return fewest_moves(state, lambda room: room.boxes == targets, self.after, MOVES, most_moves)


class Game(rules.Game):
    """A room in which boxes are pushed. Nothing in it is left to chance."""

    moves = tuple(MOVES)

    def __init__(self, board: Board, rng: random.Random | None = None) -> None:
        self.board = board
        self.state = board.start
        self._targets = board.targets

    @property
    def won(self) -> bool:
        return self.state.boxes == self._targets

    def grid(self) -> list[str]:
        """The rows in the cells of a board's own."""
        return ["".join(self._cell((y, x)) for x in range(len(row))) for y, row in enumerate(self.board.rows)]

    def places(self) -> dict[str, list[Cell]]:
        return {
            "Walls": found(self.board.rows, "#"),
            "Targets": sorted(self._targets),
            "Boxes": sorted(self.state.boxes),
            "Player": [self.state.player],
        }

    def _make_move(self, move: str) -> float:
        on_targets = len(self.state.boxes & self._targets)
        self.state = self.board.after(self.state, move)
        gain = len(self.state.boxes & self._targets) - on_targets
        return _MOVE + (_ON if gain > 0 else _OFF if gain < 0 else 0.0) + (_SOLVED if self.won else 0.0)

    def _cell(self, place: Cell) -> str:
        on = place in self._targets
        if place == self.state.player:
            return "S" if on else "P"
        if place in self.state.boxes:
            return "√" if on else "X"
        return "#" if self.board.wall(place) else "O" if on else "_"


def beside(place: Cell, move: str) -> Cell:
    """The cell in the direction of a move."""
    return place[0] + MOVES[move][0], place[1] + MOVES[move][1]


class Room:
    """A room as a demonstrator sees it: the places of box and target, the next push, and the cells around.

    The habit is to walk straight to the box and push on. Of several boxes the one is meant that has to be pushed next.
    """

    moves = tuple(MOVES)

    def __init__(self, turn: Turn) -> None:
        self._game = game_of(turn, Game)
        self._most = turn.moves_left
        self._board = self._game.board
        self._targets = self._game.board.targets
        self._plans: dict[RoomState, list[str]] = {}

    def state(self) -> RoomState:
        return self._game.state

    def facts(self, state: RoomState) -> str:
        box, push = self._next(state)
        target = min(self._targets - state.boxes)
        around = " ".join(f"{move} {self._beside(state, move)}" for move in self.moves)
        return f"box {away(state.player, box)} target {away(box, target)} . {push} . {around}"

    def plan(self, state: RoomState) -> list[str]:
        if state not in self._plans:
            self._plans[state] = self._board.solve(state, self._most) or []
        return self._plans[state]

    def habit(self, state: RoomState) -> str:
        return straight(state.player, self._next(state)[0])

    def after(self, state: RoomState, move: str) -> RoomState:
        return self._board.after(state, move)

    def over(self, state: RoomState) -> bool:
        return state.boxes == self._targets

    def _next(self, state: RoomState) -> tuple[Cell, str]:
        """The box that the plan pushes next, and where that is done from."""
        start = state.player
        for move in self.plan(state):
            next_state = self.after(state, move)
            if next_state.boxes != state.boxes:
                return next_state.player, f"push {move} from {away(start, state.player)}"
            state = next_state
        return min(state.boxes - self._targets), "stuck"

    def _beside(self, state: RoomState, move: str) -> str:
        cell = beside(state.player, move)
        if cell in state.boxes:
            return "box"
        return "wall" if self._board.wall(cell) else "target" if cell in self._targets else "floor"


def best_pushes(turn: Turn, rng: random.Random) -> Iterator[Play]:
    """The fewest moves that solve the room; where the moves left are too few, any."""
    game = game_of(turn, Game)
    while True:
        moves = game.board.solve(game.state, turn.moves_left) or rng.choices(game.moves)
        yield Play(moves[: turn.moves_per_step])


def starts(params: SokobanParams, split: str, seeds: range) -> Iterator[Start]:
    """The board of each seed; of the test split, if lengths are asked for, boards that the first seed draws."""
    if split == "test" and params.test_lengths:
        boards = Board.drawn_to(seeds.start, params.test_lengths, size=params.size, walls=params.walls)
    else:
        draw = partial(Board.draw, size=params.size, walls=params.walls, most_moves=params.most_moves)
        boards = [*map(draw, seeds)]
    for seed, board in zip(seeds, boards, strict=True):
        plan = board.solve(board.start, params.most_moves) or []
        yield Start(board, f"Sokoban, {params.size} by {params.size}, seed {seed}", len(plan))


PLAYERS = {"random": at_random, "oracle": best_pushes, "demonstrator": demonstrator(Room, Habits(0.5, 0.05))}
