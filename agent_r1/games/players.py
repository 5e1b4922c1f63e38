"""Who plays a game without a model and sees its true state: chance, and whoever shows how it is played."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from agent_r1.games.rules import Cell, Game

G = TypeVar("G", bound=Game)


class Turn(Protocol):
    """A game at a turn of its player, and how much is left of the episode."""

    game: Game
    moves_per_step: int
    steps_left: int
    moves_left: int


class Play(NamedTuple):
    """What a player does in one step."""

    moves: Sequence[str]
    thought: str = ""


# Plays the game that it is for; next() is its next step.
Player = Callable[[Turn, random.Random], Iterator[Play]]


class Habits(NamedTuple):
    """The chance of each mistake that a demonstrator makes instead of the right move."""

    habit: float  # a move that looks right and leads astray
    stray: float  # any move at all


def game_of(turn: Turn, kind: type[G]) -> G:
    """The game of a turn; TypeError if it is another kind than the player's."""
    if not isinstance(turn.game, kind):
        raise TypeError(f"a script for another game than {type(turn.game).__module__}")
    return turn.game


def at_random(turn: Turn, rng: random.Random) -> Iterator[Play]:
    """Uniform moves, as many at a time as are allowed: the floor."""
    while True:
        yield Play(rng.choices(turn.game.moves, k=min(turn.moves_per_step, turn.moves_left)))


def demonstrator(view: Callable[[Turn], Any], habits: Habits) -> Player:
    """Plays as few moves at a time as the steps left allow, since it sees best near by.

    Before each move its thought states the facts, and then the move; the habits change the moves and not the facts.
    """

    def play(turn: Turn, rng: random.Random) -> Iterator[Play]:
        scene: Any = view(turn)  # whose states are those of its own game
        while True:
            state = scene.state()
            thoughts = list[str]()
            moves = list[str]()
            needed = len(scene.plan(state)) or 1
            for _ in range(min(-(-needed // turn.steps_left), turn.moves_per_step, turn.moves_left)):
                if scene.over(state):
                    break
                moves.append(_next_move(scene, state, habits, rng))
                thoughts.append(f"{scene.facts(state)} so {moves[-1]}")
                state = scene.after(state, moves[-1])
            yield Play(moves, " . ".join(thoughts))

    return play


def _next_move(scene: Any, state: Any, habits: Habits, rng: random.Random) -> str:
    drawn = rng.random()
    if drawn < habits.habit:
        return str(scene.habit(state))
    plan = scene.plan(state)
    return str(plan[0] if plan and drawn >= habits.habit + habits.stray else rng.choice(scene.moves))


def away(start: Cell, goal: Cell) -> str:
    """How far it is down or up and then right or left, such as `2 Up 1 Left`."""
    down = goal[0] - start[0]
    right = goal[1] - start[1]
    return f"{abs(down)} {'Down' if down > 0 else 'Up'} {abs(right)} {'Right' if right > 0 else 'Left'}"


def straight(start: Cell, goal: Cell) -> str:
    """The move along the longer of the two ways."""
    down = goal[0] - start[0]
    right = goal[1] - start[1]
    if abs(down) >= abs(right):
        return "Down" if down > 0 else "Up"
    return "Right" if right > 0 else "Left"
