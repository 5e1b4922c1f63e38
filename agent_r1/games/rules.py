"""The parts that games share: moves, boards as text, and the shortest way to a state."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Self, TypeVar

MOST_CHARACTERS = 10_000  # of a setup
MOST_CELLS = 12  # in a row or column

Cell = tuple[int, int]  # row and column, from the top left
S = TypeVar("S")


class Game:
    """Something that is played by moves."""

    moves: tuple[str, ...]  # the same in every state

    @property
    def done(self) -> bool:
        """Whether the game is over."""
        return self.won

    @property
    def won(self) -> bool:
        """Whether the game is over as it should be."""
        raise NotImplementedError

    def play(self, move: str) -> float:
        """Makes a move and returns its reward; a ValueError says that there is no such move now."""
        if move not in self.moves or self.done:
            raise ValueError(f"no move {move!r} of {', '.join(self.moves)}{' after the end' if self.done else ''}")
        return self._make_move(move)

    def grid(self) -> list[str]:
        """The state as it is shown, row by row."""
        raise NotImplementedError

    def places(self) -> dict[str, list[Cell]]:
        """The cells of everything on the board, by name."""
        return {}

    def _make_move(self, move: str) -> float:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenBoard:
    """The state before the first move, which a question's setup holds as JSON: numbers, texts and lists of texts."""

    @classmethod
    def read(cls, setup: str) -> Self:
        """The board of `write`; a ValueError names the fault of the setup."""
        if len(setup) > MOST_CHARACTERS:
            raise ValueError(f"a setup of {len(setup)} characters; at most {MOST_CHARACTERS} are read")
        try:
            content = json.loads(setup)
        except (ValueError, RecursionError):
            raise ValueError(f"a setup that is not JSON: {setup[:60]!r}") from None
        names = sorted(field.name for field in fields(cls))
        if not isinstance(content, dict) or sorted(content) != names:
            raise ValueError(f"a setup is a JSON object with {', '.join(names)}; got {setup[:60]!r}")
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()})

    def write(self) -> str:
        """Equal boards give equal text."""
        return json.dumps(asdict(self), ensure_ascii=False, sort_keys=True)


class Start(NamedTuple):
    """A board that a seed draws."""

    board: WrittenBoard
    text: str  # as a person would call it
    solution: int | None = None  # moves of the best one


def fewest_moves(
    state: S,
    reached: Callable[[S], bool],
    successor: Callable[[S, str], S | None],
    moves: Iterable[str],
    most: int | None = None,
) -> list[str] | None:
    """The fewest moves to a `reached` state, breadth first; None beyond `most`. `successor` gives None to bar one."""
    moves = tuple(moves)
    plans = {state: list[str]()}
    waiting = deque([state])
    while waiting:
        state = waiting.popleft()
        if reached(state):
            return plans[state]
        if len(plans[state]) == most:
            continue
        for move in moves:
            target = successor(state, move)
            if target is not None and target not in plans:
                plans[target] = [*plans[state], move]
                waiting.append(target)
    return None


def require_rows(rows: Any, cells: str) -> None:
    """Raises ValueError if the rows of a board are no rectangle of these cells."""
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, str) for row in rows):
        raise ValueError("field 'rows' is a list of texts, one for each row of the board")
    if not 1 <= len(rows) <= MOST_CELLS or not 1 <= len(rows[0]) <= MOST_CELLS or len({*map(len, rows)}) > 1:
        raise ValueError(f"field 'rows' is no rectangle of at most {MOST_CELLS} by {MOST_CELLS} cells")
    if strange := {*"".join(rows)} - {*cells}:
        raise ValueError(f"field 'rows' holds {', '.join(map(repr, sorted(strange)))}; cells are {' '.join(cells)}")


def found(rows: Sequence[str], cells: str) -> list[Cell]:
    """The places of these cells, row by row."""
    return [(y, x) for y, row in enumerate(rows) for x, cell in enumerate(row) if cell in cells]


def just_one(rows: Sequence[str], cells: str, name: str) -> Cell:
    """The place of the only one of these cells; a ValueError names it if there are none or several."""
    places = found(rows, cells)
    if len(places) != 1:
        raise ValueError(f"field 'rows' has {len(places)} cells with the {name}; a board has one")
    return places[0]
