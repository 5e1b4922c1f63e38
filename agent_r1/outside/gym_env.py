"""Environments of gymnasium (Towers et al., arXiv 2407.17032), and others registered with it, played in text.

They run in the stage's own process; OpenEnv suits slow ones better.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from operator import itemgetter
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from agent_r1 import own_code
from agent_r1.envs.shared import Shared
from agent_r1.envs.text_env import Moved, Seed, Setup, TextEnv, meant, number
from agent_r1.http.client import in_words
from agent_r1.params.env import EnvParams
from agent_r1.params.outside import SUCCESSES, GymnasiumParams
from agent_r1.params.sections import nearest
from agent_r1.records import Outcome, Question
from agent_r1.tools.base import ToolError

_COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0?m", re.DOTALL)
_CONTROL = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")

GymWorld = gymnasium.Env[Any, Any]


class GymSetup(Setup):
    """The seed decides how the world begins; its later draws are the episode's own, and differ in a group."""

    seed: Seed


class GymEnv(TextEnv):
    """One episode of an environment.

    `env.gymnasium.<name>.success` defines success at the last move. `info`: `info["success"]` is true. `terminated` or
    `truncated`: the world ended the play so; if both, it is terminated. `last_reward` or `return`: that reward, or the
    sum of all, reaches a threshold. A play without a move has the return 0, so for a threshold of at most 0 the world
    must have ended the play.
    """

    def __init__(self, question: Question, shared: Shared, seed: int) -> None:
        """`seed` decides the world's draws after the beginning."""
        self._setup, self._params = meant(question, GymSetup, shared.limits.gymnasium)
        super().__init__(self._params.task or question.text, shared.limits)
        self.moves = self._params.actions or ()
        self._seed = seed
        self._return = 0.0
        self._read = _reader(self._setup.name, self._params)
        self.world: GymWorld | None = None

    async def begin(self) -> str:
        self.world = _make(self._setup.name, self._params)
        observation = _begun(self.world, self._setup.name, self._params, self._setup.seed)
        self.world.unwrapped.np_random = np.random.Generator(np.random.PCG64(self._seed))
        actions = f"Actions: {', '.join(self.moves)}.\n\n" if self.moves else ""
        return actions + _drawing(self.world, self._read(observation))

    async def move(self, text: str) -> Moved:
        if self.world is None:
            raise RuntimeError("the environment was not opened")
        action = _action(text, self.moves, self.world.action_space)
        observation, reward, terminated, truncated, info = self.world.step(action)
        earned = number(reward, f"env.gymnasium.{self._setup.name}")
        self._return += earned
        outcome = Outcome.ENDED if terminated else Outcome.TURN_LIMIT if truncated else None
        drawing = "" if outcome else _drawing(self.world, self._read(observation))
        return Moved(drawing, earned, self._succeeded(earned, outcome, info), outcome)

    async def close(self) -> None:
        if self.world:
            self.world.close()

    def _succeeded(self, reward: float, outcome: Outcome | None, info: Mapping[str, Any]) -> bool:
        match self._params.success:
            case "terminated":
                return outcome is Outcome.ENDED
            case "truncated":
                return outcome is Outcome.TURN_LIMIT
            case {"last_reward": float(least)}:
                return _reaches(reward, least)
            case {"return": float(least)}:
                return _reaches(self._return, least) and (outcome is not None or least > 0)
        if outcome and "success" not in info:
            raise ValueError(_no_success(self._setup.name, self._params))
        return bool(info.get("success"))


def require_gymnasium(questions: Sequence[Question], limits: EnvParams) -> None:
    """Raises ValueError for a question whose world is not declared, or cannot be made or played."""
    worlds = [meant(question, GymSetup, limits.gymnasium) for question in questions]
    for name, params in {setup.name: params for setup, params in worlds}.items():
        read = _reader(name, params)
        with closing(_make(name, params)) as world, closing(_make(name, params)) as twin:
            beginnings = [_drawing(env, read(_begun(env, name, params, 0))) for env in (world, twin)]
            _require_success(world, name, params, limits.max_steps)
        if len(beginnings[0]) > limits.max_result_characters and world.render_mode != "ansi":
            raise ValueError(
                f"env.gymnasium.{name}: an observation of {params.id} takes {len(beginnings[0]):,} characters, of "
                f"which env.max_result_characters shows {limits.max_result_characters:,}; raise that, or name a key of "
                "it or a function (module:name) under observation"
            )
        if beginnings[0] != beginnings[1]:
            raise ValueError(
                f"env.gymnasium.{name}: {params.id} begins in two ways with the same seed, so that nothing could be "
                "repeated; choose kwargs with which its seed decides"
            )


def _require_success(world: GymWorld, name: str, params: GymnasiumParams, max_steps: int) -> None:
    """Raises ValueError if no play could show the success. A random play shows whether the world's info has it."""
    lasts = world.spec and world.spec.max_episode_steps
    if params.success == "truncated" and lasts and lasts > max_steps:
        raise ValueError(
            f"env.gymnasium.{name}: {params.id} is truncated after {lasts} steps, which no episode of "
            f"env.max_steps {max_steps} reaches; raise that, or set kwargs.max_episode_steps to {max_steps} or less"
        )
    if params.success in (None, "info"):
        has_success = _shows_success(world, max_steps)
        if has_success is False or (has_success is None and params.success is None):
            raise ValueError(_no_success(name, params))


def _shows_success(world: GymWorld, max_steps: int) -> bool | None:
    """Whether the info of a random play has a success; None if it had none so far and the play did not end."""
    world.action_space.seed(0)
    world.reset(seed=0)
    for _ in range(max_steps):
        _, _, terminated, truncated, info = world.step(world.action_space.sample())
        if "success" in info or terminated or truncated:
            return "success" in info
    return None


def _no_success(name: str, params: GymnasiumParams) -> str:
    return (
        f'env.gymnasium.{name}: the info of {params.id} has no "success"; say under success what one play must show: '
        f"{SUCCESSES}"
    )


def _reaches(value: float, least: float) -> bool:
    """Whether a reward is at least `least`, but for rounding: rewards of single precision are off by a little."""
    return value >= least or math.isclose(value, least, rel_tol=1e-6)


def _make(name: str, params: GymnasiumParams) -> GymWorld:
    try:
        world: GymWorld = gymnasium.make(params.id, disable_env_checker=True, **params.kwargs)
        _require_playable(world.action_space, params.actions)
        keys = world.observation_space.spaces if isinstance(world.observation_space, spaces.Dict) else {}
        if params.observation not in ("", *keys) and ":" not in params.observation:
            close = nearest(params.observation, keys) if keys else ", nor any other key"
            raise ValueError(f"it observes no {params.observation!r}{close}")
    except Exception as fault:
        raise ValueError(
            f"env.gymnasium.{name}: {params.id} cannot be used ({type(fault).__name__}: {fault})"
        ) from fault
    return world


def _begun(world: GymWorld, name: str, params: GymnasiumParams, seed: int) -> Any:
    """The first observation of a play; a ValueError names a world that does not begin."""
    try:
        return world.reset(seed=seed)[0]
    except Exception as fault:
        problem = f"reset of {params.id} with the seed {seed} raised {in_words(fault)}"
        raise ValueError(f"env.gymnasium.{name}: {problem}") from fault


def _require_playable(space: spaces.Space[Any], actions: list[str] | None) -> None:
    if isinstance(space, spaces.Discrete):
        if len(actions or []) != space.n:
            raise ValueError(f"it has {space.n} actions, and not {len(actions or [])}; name all of them under actions")
    elif not isinstance(space, spaces.Text):
        raise ValueError(f"its actions are {space}; only those of Discrete and Text can be written")
    elif actions:
        raise ValueError("it takes text, and actions has no effect; leave it out")


def _action(text: str, moves: Sequence[str], space: spaces.Space[Any]) -> int | str:
    """The environment's action for a text; raises ToolError if there is none."""
    if isinstance(space, spaces.Discrete):
        names = [move.casefold() for move in moves]
        if text.casefold() not in names:
            raise ToolError(f"there is no action {text!r}, only {', '.join(moves)}")
        return int(space.start) + names.index(text.casefold())
    if not space.contains(text):
        raise ToolError(f"it takes no such text as {text!r}, only {space}")
    return text


def _drawing(world: GymWorld, observation: Any) -> str:
    """The world's drawing, if it draws text, and else the whole of the observation."""
    if world.render_mode != "ansi":
        return _written(observation)
    drawing = world.render()
    if not isinstance(drawing, str):
        raise ValueError(f"{world} draws {type(drawing).__name__} under render_mode ansi, and not text")
    return plain(drawing).strip("\n")


def _reader(name: str, params: GymnasiumParams) -> Callable[[Any], Any]:
    """Takes the part of an observation that `observation` has shown: all, one key, or the result of an own function."""
    if ":" in params.observation:
        return own_code.load(f"env.gymnasium.{name}.observation", params.observation)
    return itemgetter(params.observation) if params.observation else lambda observed: observed


def _written(observation: Any) -> str:
    """All of an observation; of a mapping a line for each value, the longest array last, as the end may be cut."""
    with np.printoptions(threshold=sys.maxsize):
        if not isinstance(observation, Mapping):
            return str(observation)
        values = sorted(observation.items(), key=lambda item: item[1].size if isinstance(item[1], np.ndarray) else 0)
        texts = {key: value if isinstance(value, str) else " ".join(str(value).split()) for key, value in values}
    return "\n".join(f"{key}: {text}" for key, text in texts.items())


def plain(drawn: str) -> str:
    """A drawing with its colours in words: `[S]` for a coloured background, `(blue R)` for a coloured letter."""
    return _CONTROL.sub("", _COLOURED.sub(_bracketed, drawn))


def _bracketed(match: re.Match[str]) -> str:
    codes = [int(code) for code in match[1].split(";") if code]
    if any(40 <= code < 50 or code == 7 for code in codes):
        return f"[{match[2]}]"
    for code in codes:
        if 30 <= code < 30 + len(_COLOURS):
            return f"({_COLOURS[code - 30]} {match[2]})"
    return match[2]
