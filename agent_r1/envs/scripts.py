"""Agents without a model, which see the true state: chance, the best there is, and in games somebody to learn from.

They play in the loop in which policies play, by `scripted` and a ScriptedSampler, for a floor, a ceiling, and
demonstrations.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from agent_r1.envs.base import Attempt, Env, ParsedCall, hermes
from agent_r1.envs.game_env import SEPARATOR, GameEnv
from agent_r1.envs.text_env import TextEnv
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.games import bandit, lake, sokoban
from agent_r1.games.rules import Cell
from agent_r1.seeds import derive

_NAME = re.compile(r"[A-Z]\w*(?: [A-Z]\w*)*|\d+")  # or a number

G = TypeVar("G")


class Ice:
    """A lake as a demonstrator sees it: the distance of the goal, and the cells around.

    The habit is to go straight to the goal, holes or not. `plan` and `after` hold if no move goes astray.
    """

    moves = tuple(lake.MOVES)

    def __init__(self, env: GameEnv) -> None:
        self._game = game_of(env, lake.Game)
        self._board = self._game.board

    def state(self) -> Cell:
        return self._game.player

    def facts(self, state: Cell) -> str:
        around = " ".join(f"{move} {self._beside(state, move)}" for move in self.moves)
        return f"goal {_away(state, self._board.goal)} . {around}"

    def plan(self, state: Cell) -> list[str]:
        return self._board.way(state) or []

    def habit(self, state: Cell) -> str:
        return _straight(state, self._board.goal)

    def after(self, state: Cell, move: str) -> Cell:
        return self._board.after(state, move)

    def over(self, state: Cell) -> bool:
        return self._board.cell(state) in "HG"

    def _beside(self, state: Cell, move: str) -> str:
        cell = self._board.after(state, move)
        return "edge" if cell == state else {"H": "hole", "G": "goal"}.get(self._board.cell(cell), "ice")


class Room:
    """A room as a demonstrator sees it: the places of box and target, the next push, and the cells around.

    The habit is to walk straight to the box and push on. Of several boxes the one is meant that has to be pushed next.
    """

    moves = tuple(sokoban.MOVES)

    def __init__(self, env: GameEnv) -> None:
        self._game = game_of(env, sokoban.Game)
        self._most = env.moves_left
        self._board = self._game.board
        self._targets = self._game.board.targets
        self._plans: dict[sokoban.RoomState, list[str]] = {}

    def state(self) -> sokoban.RoomState:
        return self._game.state

    def facts(self, state: sokoban.RoomState) -> str:
        box, push = self._next(state)
        target = min(self._targets - state.boxes)
        around = " ".join(f"{move} {self._beside(state, move)}" for move in self.moves)
        return f"box {_away(state.player, box)} target {_away(box, target)} . {push} . {around}"

    def plan(self, state: sokoban.RoomState) -> list[str]:
        if state not in self._plans:
            self._plans[state] = self._board.solve(state, self._most) or []
        return self._plans[state]

    def habit(self, state: sokoban.RoomState) -> str:
        return _straight(state.player, self._next(state)[0])

    def after(self, state: sokoban.RoomState, move: str) -> sokoban.RoomState:
        return self._board.after(state, move)

    def over(self, state: sokoban.RoomState) -> bool:
        return state.boxes == self._targets

    def _next(self, state: sokoban.RoomState) -> tuple[Cell, str]:
        """The box that the plan pushes next, and where that is done from."""
        start = state.player
        for move in self.plan(state):
            next_state = self.after(state, move)
            if next_state.boxes != state.boxes:
                return next_state.player, f"push {move} from {_away(start, state.player)}"
            state = next_state
        return min(state.boxes - self._targets), "stuck"

    def _beside(self, state: sokoban.RoomState, move: str) -> str:
        cell = sokoban.beside(state.player, move)
        if cell in state.boxes:
            return "box"
        return "wall" if self._board.wall(cell) else "target" if cell in self._targets else "floor"


def _away(start: Cell, goal: Cell) -> str:
    """How far it is down or up and then right or left, such as `2 Up 1 Left`."""
    down = goal[0] - start[0]
    right = goal[1] - start[1]
    return f"{abs(down)} {'Down' if down > 0 else 'Up'} {abs(right)} {'Right' if right > 0 else 'Left'}"


def _straight(start: Cell, goal: Cell) -> str:
    """The move along the longer of the two ways."""
    down = goal[0] - start[0]
    right = goal[1] - start[1]
    if abs(down) >= abs(right):
        return "Down" if down > 0 else "Up"
    return "Right" if right > 0 else "Left"


def game_of(env: GameEnv, kind: type[G]) -> G:
    if not isinstance(env.game, kind):
        raise TypeError(f"a script for another game than {type(env.game).__module__}")
    return env.game


# Plays in the environment that it is for; next() is the text of the next action, without its end.
Script = Callable[[Any, random.Random], Iterator[str]]


class Habits(NamedTuple):
    """The chance of each mistake that a demonstrator makes instead of the right move."""

    habit: float  # a move that looks right and leads astray
    stray: float  # any move at all


# Mistakes with which a demonstrator loses so often that there is something to be learned beyond it.
ARMS = Habits(0.5, 0.0)
ICE = Habits(0.5, 0.05)
ROOM = Habits(0.5, 0.05)


def scripted(attempt: Attempt, script: Script, seed: int) -> tuple[Attempt, Iterable[str]]:
    """The attempt, and the script in the environment that it makes; TypeError if no script is for that."""
    player = _Player(attempt, script, seed)
    return replace(attempt, env=player.open), player


class _Player:
    """A script beside its environment; asked for again, it plays in the one that was made last."""

    def __init__(self, attempt: Attempt, script: Script, seed: int) -> None:
        self._make = attempt.env
        self._script = script
        self._seed = derive(seed, "script", attempt.question_id, attempt.sample)
        self._env: Env | None = None

    def open(self, seed: int) -> Env:
        self._env = self._make(seed)
        return self._env

    def __iter__(self) -> Iterator[str]:
        if not isinstance(self._env, GameEnv | TextEnv | ToolEnv):
            raise TypeError(f"a script plays games and answers questions, and not in {type(self._env).__name__}")
        return self._script(self._env, random.Random(self._seed))


async def texts_of(env: Env, script: Iterable[str]) -> list[str]:
    """All texts of an episode that is played by a script, read and written, in their order."""
    await env.open()
    texts = [env.system, env.user]
    actions = iter(script)
    while True:
        texts.append(next(actions))
        transition = await env.step(texts[-1])
        if transition.outcome is not None:
            await env.close()
            return texts
        texts += transition.observations


def said(moves: Sequence[str], thought: str = "") -> str:
    """An action's text. Spaces within the tags give a move the same token wherever it stands."""
    answer = f"<answer> {f' {SEPARATOR} '.join(moves)} </answer>"
    return f"<think> {thought} </think> {answer}" if thought else answer


def at_random(env: GameEnv, rng: random.Random) -> Iterator[str]:
    """Uniform moves, as many at a time as are allowed: the floor."""
    while True:
        yield said(rng.choices(env.game.moves, k=min(env.moves_per_step, env.moves_left)))


def any_move(env: TextEnv, rng: random.Random) -> Iterator[str]:
    """A uniform move, one at a time, where they have names: the floor of a world that others wrote."""
    if not env.moves:
        raise ValueError("chance has no move in a world that takes text; leave random out of repro_baselines")
    while True:
        yield said([rng.choice(env.moves)])


def any_name(env: ToolEnv, rng: random.Random) -> Iterator[str]:
    """Searches for the question's words and for names in what it reads, so often as chance has it; answers likewise."""
    names = ["yes", "no"]
    query = env.user
    for _ in range(rng.randrange(env.steps_left)):
        yield searched(query)
        names += _NAME.findall(env.shown[-1]) if env.shown else []
        query = rng.choice(names)
    yield said([rng.choice(names)])


def by_gold_titles(env: ToolEnv, rng: random.Random) -> Iterator[str]:
    """Searches for the gold passages, first for those whose titles it has read, and then knows the answer.

    It answers that it does not know where the data names no gold passages, or one cannot be found in the steps it has.
    """
    while env.unseen and env.steps_left > 1:
        read = "\n".join([env.user, *env.shown])
        yield searched(min(env.unseen, key=lambda title: (title not in read, title)))
    knows = env.gold and env.gold.answers and env.gold.gold_titles and not env.unseen
    yield said([env.gold.answers[0] if env.gold and knows else "unknown"])


def searched(query: str) -> str:
    """The text of a search."""
    return hermes([ParsedCall("search", {"query": query})])


def best_arm(env: GameEnv, rng: random.Random) -> Iterator[str]:
    """Pulls the arm that pays more on average."""
    yield said([game_of(env, bandit.Game).board.high])


def best_walk(env: GameEnv, rng: random.Random) -> Iterator[str]:
    """The moves with the best chance of the goal, in sight of the ice's chances but not of its draws."""
    game = game_of(env, lake.Game)
    planner = lake.Planner(game.board, env.moves_per_step)
    while True:
        way = game.board.way(game.player) if game.board.intended == 1 else None
        moves = way or planner.best(game.player, env.steps_left, env.moves_left).moves
        yield said(moves[: env.moves_per_step])


def best_pushes(env: GameEnv, rng: random.Random) -> Iterator[str]:
    """The fewest moves that solve the room; where the moves left are too few, any."""
    game = game_of(env, sokoban.Game)
    while True:
        moves = game.board.solve(game.state, env.moves_left) or rng.choices(game.moves)
        yield said(moves[: env.moves_per_step])


def demonstrated_arm(habits: Habits) -> Script:
    """Pulls an arm, with a thought that states which one is better; the habit is the safe one."""

    def play(env: GameEnv, rng: random.Random) -> Iterator[str]:
        board = game_of(env, bandit.Game).board
        [low] = {*board.arms} - {board.high}
        arm = low if rng.random() < habits.habit else board.high
        yield said([arm], f"{low} is safe {board.high} pays more so {arm}")

    return play


def demonstrator(view: Callable[[GameEnv], Ice | Room], habits: Habits) -> Script:
    """Plays as few moves at a time as the steps left allow, since it sees best near by.

    Before each move its thought states the facts, and then the move; the habits change the moves and not the facts.
    """

    def play(env: GameEnv, rng: random.Random) -> Iterator[str]:
        scene: Any = view(env)  # whose states are those of its own game
        while True:
            state = scene.state()
            thoughts = list[str]()
            moves = list[str]()
            needed = len(scene.plan(state)) or 1
            for _ in range(min(-(-needed // env.steps_left), env.moves_per_step, env.moves_left)):
                if scene.over(state):
                    break
                moves.append(_next_move(scene, state, habits, rng))
                thoughts.append(f"{scene.facts(state)} so {moves[-1]}")
                state = scene.after(state, moves[-1])
            yield said(moves, " . ".join(thoughts))

    return play


def _next_move(scene: Any, state: Any, habits: Habits, rng: random.Random) -> str:
    drawn = rng.random()
    if drawn < habits.habit:
        return str(scene.habit(state))
    plan = scene.plan(state)
    return str(plan[0] if plan and drawn >= habits.habit + habits.stray else rng.choice(scene.moves))


# By the name of a game, as in `agent_r1.envs.game_env.GAMES`.
SCRIPTS: Mapping[str, Mapping[str, Script]] = {
    "bandit": {"random": at_random, "oracle": best_arm, "demonstrator": demonstrated_arm(ARMS)},
    "frozen_lake": {"random": at_random, "oracle": best_walk, "demonstrator": demonstrator(Ice, ICE)},
    "sokoban": {"random": at_random, "oracle": best_pushes, "demonstrator": demonstrator(Room, ROOM)},
}
