"""Agents without a model, which see the true state: chance, the best there is, and in games somebody to learn from.

They play in the loop in which policies play, by `scripted` and a ScriptedSampler, for a floor, a ceiling, and
demonstrations.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from agent_r1.envs.base import Attempt, Env, ParsedCall, hermes
from agent_r1.envs.game_env import SEPARATOR, GameEnv
from agent_r1.envs.text_env import TextEnv
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.games.players import Player
from agent_r1.seeds import derive

_NAME = re.compile(r"[A-Z]\w*(?: [A-Z]\w*)*|\d+")  # or a number

# Plays in the environment that it is for; next() is the text of the next action, without its end.
Script = Callable[[Any, random.Random], Iterator[str]]


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


def spoken(player: Player) -> Script:
    """What a game's player does, in the texts of actions."""

    def play(env: GameEnv, rng: random.Random) -> Iterator[str]:
        for moves, thought in player(env, rng):
            yield said(moves, thought)

    return play


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
