"""Games as those see them who play by their true state, and how they imagine them some moves on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from agent_r1.envs.turns import Turns
from agent_r1.games import bandit, lake, sokoban
from agent_r1.games.setup import Cell

G = TypeVar("G")


class View(Protocol[G]):
    """A game as a demonstrator sees it, and as it imagines it some moves on, if none goes astray."""

    moves: tuple[str, ...]

    def state(self) -> G:
        """What is the case."""

    def facts(self, state: G) -> str:
        """What it says of that, as words."""

    def plan(self, state: G) -> Sequence[str]:
        """The right moves; none where nothing helps."""

    def habit(self, state: G, rng: random.Random) -> str:
        """The move that looks right."""

    def after(self, state: G, move: str) -> G:
        """What a move makes of it."""

    def over(self, state: G) -> bool:
        """Whether there is nothing more to do."""


class Arms:
    """Which arm is which; the habit is the safe one."""

    def __init__(self, env: Turns) -> None:
        game = game_of(env, bandit.Game)
        self.moves, self._high = game.moves, game.board.high
        [self._low] = {*game.moves} - {self._high}

    def state(self) -> str:
        return ""

    def facts(self, state: str) -> str:
        return f"{self._low} is safe {self._high} pays more"

    def plan(self, state: str) -> list[str]:
        return [self._high]

    def habit(self, state: str, rng: random.Random) -> str:
        return self._low

    def after(self, state: str, move: str) -> str:
        return move

    def over(self, state: str) -> bool:
        return bool(state)


class Ice:
    """How far the goal is, and what lies around; the habit is to go straight to the goal, holes or not."""

    moves = tuple(lake.MOVES)

    def __init__(self, env: Turns) -> None:
        self._game = game_of(env, lake.Game)
        self._board = self._game.board

    def state(self) -> Cell:
        return self._game.player

    def facts(self, state: Cell) -> str:
        return (
            f"goal {_away(state, self._board.goal)} . {' '.join(f'{m} {self._beside(state, m)}' for m in self.moves)}"
        )

    def plan(self, state: Cell) -> list[str]:
        return self._board.way(state) or []

    def habit(self, state: Cell, rng: random.Random) -> str:
        return _straight(state, self._board.goal)

    def after(self, state: Cell, move: str) -> Cell:
        return self._board.after(state, move)

    def over(self, state: Cell) -> bool:
        return self._board.cell(state) in "HG"

    def _beside(self, state: Cell, move: str) -> str:
        there = self._board.after(state, move)
        return "edge" if there == state else {"H": "hole", "G": "goal"}.get(self._board.cell(there), "ice")


class Room:
    """Where box and target are, from where to push next, and what lies around.

    The habit is to walk straight to the box and push on. Of several boxes the one is meant that has to be pushed next.
    """

    moves = tuple(sokoban.MOVES)

    def __init__(self, env: Turns) -> None:
        self._game, self._most = game_of(env, sokoban.Game), env.moves_left
        self._board, self._targets = self._game.board, self._game.board.targets
        self._plans: dict[sokoban.State, list[str]] = {}

    def state(self) -> sokoban.State:
        return self._game.state

    def facts(self, state: sokoban.State) -> str:
        box, push = self._next(state)
        target = min(self._targets - state.boxes)
        around = " ".join(f"{move} {self._beside(state, move)}" for move in self.moves)
        return f"box {_away(state.player, box)} target {_away(box, target)} . {push} . {around}"

    def plan(self, state: sokoban.State) -> list[str]:
        if state not in self._plans:
            self._plans[state] = self._board.solve(state, self._most) or []
        return self._plans[state]

    def habit(self, state: sokoban.State, rng: random.Random) -> str:
        return _straight(state.player, self._next(state)[0])

    def after(self, state: sokoban.State, move: str) -> sokoban.State:
        return self._board.after(state, move)

    def over(self, state: sokoban.State) -> bool:
        return state.boxes == self._targets

    def _next(self, state: sokoban.State) -> tuple[Cell, str]:
        """The box that the plan pushes next, and where that is done from."""
        here = state.player
        for move in self.plan(state):
            there = self.after(state, move)
            if there.boxes != state.boxes:
                return there.player, f"push {move} from {_away(here, state.player)}"
            state = there
        return min(state.boxes - self._targets), "stuck"

    def _beside(self, state: sokoban.State, move: str) -> str:
        there = sokoban.beside(state.player, move)
        if there in state.boxes:
            return "box"
        return "wall" if self._board.wall(there) else "target" if there in self._targets else "floor"


def _away(here: Cell, there: Cell) -> str:
    """How far it is down or up and then right or left, such as `2 Up 1 Left`."""
    down, right = there[0] - here[0], there[1] - here[1]
    return f"{abs(down)} {'Down' if down > 0 else 'Up'} {abs(right)} {'Right' if right > 0 else 'Left'}"


def _straight(here: Cell, there: Cell) -> str:
    """The move along the longer of the two ways."""
    down, right = there[0] - here[0], there[1] - here[1]
    if abs(down) >= abs(right):
        return "Down" if down > 0 else "Up"
    return "Right" if right > 0 else "Left"


def game_of(env: Turns, kind: type[G]) -> G:
    if not isinstance(env.game, kind):
        raise TypeError(f"a script for another game than {type(env.game).__module__}")
    return env.game
