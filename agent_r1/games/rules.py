"""What the games have in common: a move is one that there is, and a solver takes the fewest."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

S = TypeVar("S")


def require_move(move: str, moves: Sequence[str], *, done: bool) -> None:
    """Raises ValueError if there is no such move now."""
    if move not in moves or done:
        raise ValueError(f"no move {move!r} of {', '.join(moves)}{' after the end' if done else ''}")


def fewest_moves(
    state: S,
    reached: Callable[[S], bool],
    after: Callable[[S, str], S | None],
    moves: Iterable[str],
    most: int | None = None,
) -> list[str] | None:
    """The fewest moves to a state that is wanted, in breadth-first order; None where that takes more than `most`.

    `after` says what a move makes of a state, and None of one that is not to be made.
    """
    moves, plans, waiting = tuple(moves), {state: list[str]()}, deque([state])
    while waiting:
        here = waiting.popleft()
        if reached(here):
            return plans[here]
        if len(plans[here]) == most:
            continue
        for move in moves:
            there = after(here, move)
            if there is not None and there not in plans:
                plans[there] = [*plans[here], move]
                waiting.append(there)
    return None


MOST_CHARACTERS = 10_000  # of a setup
MOST_CELLS = 12  # in a row or column

Cell = tuple[int, int]  # row and column, from the top left


def write(fields: dict[str, Any]) -> str:
    """Equal fields give equal text."""
    return json.dumps(fields, ensure_ascii=False, sort_keys=True)


def read(setup: str, names: Collection[str]) -> dict[str, Any]:
    """The fields of a setup; a ValueError says that it is no JSON object of exactly these."""
    if len(setup) > MOST_CHARACTERS:
        raise ValueError(f"a setup of {len(setup)} characters; at most {MOST_CHARACTERS} are read")
    try:
        fields = json.loads(setup)
    except (ValueError, RecursionError):
        raise ValueError(f"a setup that is not JSON: {setup[:60]!r}") from None
    if not isinstance(fields, dict) or set(fields) != set(names):
        raise ValueError(f"a setup is a JSON object with {', '.join(sorted(names))}; got {setup[:60]!r}")
    return fields


def rows_of(rows: Any, cells: str) -> tuple[str, ...]:
    """The rows of a board, which is a rectangle of these cells; a ValueError says what it is else."""
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, str) for row in rows):
        raise ValueError("field 'rows' is a list of texts, one for each row of the board")
    if not 1 <= len(rows) <= MOST_CELLS or not 1 <= len(rows[0]) <= MOST_CELLS or len({*map(len, rows)}) > 1:
        raise ValueError(f"field 'rows' is no rectangle of at most {MOST_CELLS} by {MOST_CELLS} cells")
    if strange := {*"".join(rows)} - {*cells}:
        raise ValueError(f"field 'rows' holds {', '.join(map(repr, sorted(strange)))}; cells are {' '.join(cells)}")
    return tuple(rows)


def found(rows: Sequence[str], cells: str) -> list[Cell]:
    """Where one of these cells is, row by row."""
    return [(y, x) for y, row in enumerate(rows) for x, cell in enumerate(row) if cell in cells]


def just_one(rows: Sequence[str], cells: str, name: str) -> Cell:
    """Where the only one of these cells is; a ValueError names it where there are none or several."""
    places = found(rows, cells)
    if len(places) != 1:
        raise ValueError(f"field 'rows' has {len(places)} cells with the {name}; a board has one")
    return places[0]
