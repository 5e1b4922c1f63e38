"""What the games have in common: a move is one that there is, and a solver takes the fewest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

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
