"""Games by the protocol of RAGEN (arXiv 2504.20073): several moves in one action, within so many turns and moves.

An action is `<think>...</think><answer>Up || Left</answer>`; the names of moves are read without case. Different from
RAGEN on purpose: a reply is never rewritten, no thought is begun for the policy, every fault of an action is told, and
its penalty is no part of the game but the reward `failed_call`. The chance of a game is the episode's own: a group
shares the board and not the ice. The rules are told in our own words.
"""

from __future__ import annotations

import json
import random
from typing import NamedTuple

from agent_r1.envs.base import Env, Transition, parse_action
from agent_r1.games.kinds import GAMES, PlayedGame
from agent_r1.params.env import EnvParams
from agent_r1.records import Call, CallStatus, Outcome

SEPARATOR = "||"
FORMAT = f"<think> [Your thoughts] </think> <answer> [moves, joined by {SEPARATOR}] </answer>"
_SHOWN = 40  # characters of a move that is unknown


class Style(NamedTuple):
    """How a game is told and shown."""

    system: str  # the system message
    user: str  # the first user message, before the first turn
    turn: str  # opens a turn
    reward: str = ""  # of the turn before
    nothing: str = ""  # told after an action without a valid move
    coordinates: bool = False  # of everything, beside the grid
    spaced: bool = False  # the cells of a row, so that each is a token of its own


_TURN = (
    "\nTurn {turn}:\nState:\n{state}\nYou have {moves} actions left. Always output: <think> [Your thoughts] </think> "
    "<answer> [your answer] </answer> with no extra text. Strictly follow this format. Max response length: 100 words "
    "(tokens).\n"
)
_REWARD = "Reward:\n{reward:g}\n"
_NOTHING = "No valid action provided previously. Environment state remains the same. Please try again.\n"
_HELPFUL = "You're a helpful assistant. "
STYLES = {
    "ragen_v1": Style(_HELPFUL, "{rules}", _TURN, _REWARD),
    "ragen_v2": Style(_HELPFUL + "{rules}", "", _TURN, _REWARD, _NOTHING, coordinates=True),
    "brief": Style("Play {name}.", "", "{state}\n{moves} moves left.", spaced=True),  # for a model that was shown how
}


class GameEnv(Env):
    """One game, in at most `limits.max_steps` actions and `limits.games.moves` moves.

    An action's moves are made in turn, each a call of `move`. An unknown move is BAD_ARGUMENTS and passed over. Moves
    beyond `moves_per_step`, beyond the moves left, and after the end are not made and are no calls. An action without
    any move is MALFORMED. The next state tells which moves were not made, and why.

    Rewards, unweighted: on every step `env`, the sum of its moves' rewards, and `think`, 1.0 for a thought before
    moves; on the last step `success`, 1.0 where the game is won. The episode is ENDED where the game is over; else, out
    of turns or moves, MALFORMED if the last action is, or TURN_LIMIT.

    Raises ValueError for a setup that is none, and for moves that no episode could make.
    """

    def __init__(self, name: str, setup: str, limits: EnvParams, seed: int = 0) -> None:
        """The game of this name in GAMES, from its setup; `seed` is of its chance."""
        played = GAMES[name]
        settings = limits.games
        if settings.moves > settings.moves_per_step * limits.max_steps:
            raise ValueError(
                f"env.games.moves {settings.moves} has no effect: env.max_steps {limits.max_steps} times "
                f"moves_per_step {settings.moves_per_step} are fewer; lower it, or raise one of the two"
            )
        self._rng = random.Random(seed)
        self.game = played.open(setup, self._rng)
        self.moves_per_step = settings.moves_per_step
        self.steps_left = limits.max_steps
        self.moves_left = min(settings.moves, played.most_moves or settings.moves)
        self._max_steps = limits.max_steps
        self._moves = {move.casefold(): move for move in self.game.moves}
        self._style = STYLES[settings.protocol]
        self._symbols = played.symbols
        told_first = {"name": name, "rules": self._rules(played)}
        self.system = " ".join(filter(None, [self._style.system.format(**told_first), limits.instructions]))
        self.user = self._style.user.format(**told_first) + self._turn()

    @property
    def state(self) -> str:
        """The board, however many moves are left."""
        return "\n".join(self.game.grid())

    async def step(self, action: str) -> Transition:
        """Takes an action's text, without its end token."""
        if self._is_over():
            raise RuntimeError("the episode is over: no step is left")
        self.steps_left -= 1
        parsed = parse_action(action)
        names = [name.strip() for name in (parsed.answer or "").split(SEPARATOR) if name.strip()]
        calls, reward = self._make(names[: self.moves_per_step])
        rewards = {"env": reward, "think": float(bool(parsed.thought and names))}
        if self._is_over():
            limit = Outcome.TURN_LIMIT if names else Outcome.MALFORMED
            outcome = Outcome.ENDED if self.game.done else limit
            return Transition(outcome=outcome, calls=calls, rewards=rewards | {"success": float(self.game.won)})
        feedback = self._style.reward.format(reward=round(reward, 6)) + self._amiss(names, calls, parsed.problem)
        return Transition(observations=(feedback + self._turn(),), calls=calls, rewards=rewards)

    def redraw(self, seed: int) -> None:
        self._rng.seed(seed)

    def _is_over(self) -> bool:
        return self.game.done or not self.steps_left or not self.moves_left

    def _make(self, names: list[str]) -> tuple[tuple[Call, ...], float]:
        """Makes the moves; returns a call for each, and the sum of their rewards."""
        if not names:
            return (Call(status=CallStatus.MALFORMED),), 0.0
        calls = list[Call]()
        reward = 0.0
        for name in names:
            if self.game.done or not self.moves_left:
                break
            move = self._moves.get(name.casefold())
            if move is not None:
                reward += self.game.play(move)
                self.moves_left -= 1
            status = CallStatus.BAD_ARGUMENTS if move is None else CallStatus.OK
            calls.append(Call(tool="move", arguments=json.dumps(move or name, ensure_ascii=False), status=status))
        return tuple(calls), reward

    def _amiss(self, names: list[str], calls: tuple[Call, ...], problem: str) -> str:
        """The parts of an action that were not done, a line for each reason."""
        if not names:
            return f"{self._style.nothing}{problem or 'there is no move in the answer'}. Write {FORMAT}.\n"
        unknown = [name for name in names[: len(calls)] if name.casefold() not in self._moves]
        lines = [f"There is no move {name[:_SHOWN]!r}, only {', '.join(self.game.moves)}.\n" for name in unknown]
        if len(unknown) == len(calls):
            lines.insert(0, self._style.nothing)
        if surplus := len(names) - len(calls):
            lines.append(f"{surplus} further moves were not made: {self.moves_per_step} are the most in one answer.\n")
        return "".join(lines)

    def _rules(self, game: PlayedGame) -> str:
        meaning = f"\nThe meaning of each symbol in the state is:\n{game.symbols}" if game.symbols else ""
        return (
            f"{game.rules}{meaning}\nYour available actions are:\n{', '.join(self.game.moves)}\n"
            f'You can make up to {self.moves_left} actions, separated by the action separator " {SEPARATOR} "\n'
        )

    def _turn(self) -> str:
        turn = self._max_steps - self.steps_left + 1
        return self._style.turn.format(turn=turn, state=self._state(), moves=self.moves_left)

    def _state(self) -> str:
        spaced = self._style.spaced and bool(self._symbols)
        grid = "\n".join(" ".join(row) if spaced else row for row in self.game.grid())
        places = self.game.places() if self._style.coordinates else {}
        lines = [f"{name}: {', '.join(map(str, cells))}" for name, cells in places.items() if cells]
        return "\n".join(["Coordinates (row, column):", *lines, "Grid Map:", grid]) if lines else grid
