"""The environments by the name that a question has for its own, and the attempts that are made in them."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import NamedTuple

from agent_r1.envs.base import Attempt, Env, opened
from agent_r1.envs.conversations import read_examples
from agent_r1.envs.game_env import GameEnv
from agent_r1.envs.scripts import Script, any_move, any_name, by_gold_titles, scripted, spoken
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import with_tools
from agent_r1.faults import WorldFault
from agent_r1.games.kinds import GAMES
from agent_r1.games.players import Player
from agent_r1.own_code import agent_hash
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import nearest
from agent_r1.records import QA, Question, of_split
from agent_r1.tools.toolbox import require_own

LOOKS_S = 10.0
_OWN_SEED = re.compile(r", seed \d+")  # in the text of a row that has no task to say

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """One environment, and who plays it without a model."""

    env: Callable[[Question, Shared, int], Env]  # made for one episode, by the seed of its own chance
    # Raises ValueError for questions that it cannot play, and WorldFault where it does not answer.
    require: Callable[[Sequence[Question], EnvParams], None] = lambda questions, limits: None
    scripts: Mapping[str, Script] = {}
    # Whether question, seed and actions restore an episode, whose chance can be drawn anew from there (`Env.redraw`).
    restored: Callable[[EnvParams], bool] = lambda limits: False
    foretold: bool = True  # whether its prompt is known before it is opened


def _game(question: Question, shared: Shared, seed: int) -> GameEnv:
    return GameEnv(question.env, question.setup, shared.limits, seed)


def _require_boards(questions: Sequence[Question], limits: EnvParams) -> None:
    for question in questions:
        try:
            GameEnv(question.env, question.setup, limits)
        except ValueError as fault:
            raise ValueError(f"question {question.question_id!r}: {fault}") from None


def _spoken(players: Mapping[str, Player]) -> dict[str, Script]:
    return {name: spoken(player) for name, player in players.items()}


def _outside(module: str, env: str, require: str, scripts: Mapping[str, Script] = MappingProxyType({})) -> Kind:
    """A world that others wrote, whose module is imported for the first question that asks for it."""
    return Kind(
        lambda question, shared, seed: vars(import_module(module))[env](question, shared, seed),
        lambda questions, limits: vars(import_module(module))[require](questions, limits),
        scripts,
        foretold=False,
    )


KINDS: dict[str, Kind] = {
    QA: Kind(
        with_tools,
        scripts={"random": any_name, "oracle": by_gold_titles},
        restored=lambda limits: not (limits.tools.python or limits.tools.mcp),
    ),
    **{name: Kind(_game, _require_boards, _spoken(game.players), lambda limits: True) for name, game in GAMES.items()},
    "gymnasium": _outside("agent_r1.outside.gym_env", "GymEnv", "require_gymnasium", {"random": any_move}),
    "openenv": _outside("agent_r1.outside.openenv", "played", "require_openenv"),
    "toolbox": _outside("agent_r1.outside.toolbox_env", "ToolboxEnv", "require_toolbox"),
}


def agent_of(env: str, limits: EnvParams) -> str:
    """The agent outside that plays the questions of an environment; "" where the loop of this project does."""
    agent = limits.agent if env == QA else env if env not in KINDS else None
    return agent if agent in limits.agents else ""


def scripts_of(env: str) -> Mapping[str, Script]:
    """Who plays an environment without a model; nobody an agent outside."""
    return KINDS[env].scripts if env in KINDS else {}


def require_playable(questions: Sequence[Question], limits: EnvParams) -> None:
    """Refuses questions that no episode could be made of, before a model is loaded.

    Raises ValueError for an unknown environment, one that cannot be made of a question's setup, own tools that are not
    there, and examples that cannot be read, and WorldFault for an environment that does not answer.
    """
    require_own(limits)
    read_examples(limits)
    for env in dict.fromkeys(question.env for question in questions):
        subset = [question for question in questions if question.env == env]
        if agent_of(env, limits):
            continue  # nobody knows before it is played
        if env not in KINDS:
            raise ValueError(f"question {subset[0].question_id!r}: there is no env {env!r}{nearest(env, KINDS)}")
        KINDS[env].require(subset, limits)


class Told(Env):
    """The opening of an agent outside, which writes its prompts itself: the hash of its declaration and source."""

    def __init__(self, question: Question, agent: str) -> None:
        self.system = agent
        self.user = question.text


def _env(question: Question, shared: Shared, agent: str, seed: int) -> Env:
    if agent:
        return Told(question, agent_hash(agent, shared.limits.agents[agent]))
    env = KINDS[question.env].env(question, shared, seed)
    env.examples = shared.examples
    return env


def attempts_at(
    questions: Sequence[Question], shared: Shared, *, samples: int = 1, first_group: int = 0, outside: bool = True
) -> list[Attempt]:
    """`samples` attempts at each question in its own environment: a group, numbered from `first_group` on.

    The agent outside that its environment names, or `env.agent`, plays it unless nobody `outside` is asked.
    """
    agents = {question.env: agent_of(question.env, shared.limits) if outside else "" for question in questions}
    return [
        Attempt(
            question_id=question.question_id,
            group=group,
            sample=sample,
            env=partial(_env, question, shared, agents[question.env]),
            question=question,
            agent=agents[question.env],
        )
        for group, question in enumerate(questions, start=first_group)
        for sample in range(samples)
    ]


def foretold(attempt: Attempt) -> bool:
    """Whether an attempt's prompt is known before a world's reset, or an agent outside, says it."""
    return not attempt.agent and (attempt.question is None or KINDS[attempt.question.env].foretold)


def openings(attempts: Sequence[Attempt], questions: Sequence[Question], shared: Shared) -> list[Env]:
    """The environment of the first attempt at each data set, opened and closed again."""
    dataset = {question.question_id: question.dataset for question in questions}
    firsts: dict[str, Attempt] = {}
    for attempt in attempts:
        firsts.setdefault(dataset[attempt.question_id], attempt)
    return [shared.run(opened(attempt.env(0))) for attempt in firsts.values()]


def warn_of_alike(questions: Sequence[Question], shared: Shared) -> None:
    """Says how many test rows of others' worlds begin as a training row does, in LOOKS_S seconds for each world."""
    for dataset in dict.fromkeys(row.dataset for row in questions if row.env in shared.limits.declared):
        texts = _first_texts([row for row in questions if row.dataset == dataset], shared)
        training_rows = {text: name for name, text in texts["train"].items()}
        alike = [f"{name} and {training_rows[text]}" for name, text in texts["test"].items() if text in training_rows]
        if alike:
            logger.warning(
                "%s: %d of %d test rows begin as a training row does, such as %s, so that they may be one task",
                dataset,
                len(alike),
                len(texts["test"]),
                alike[0],
            )


def _first_texts(questions: Sequence[Question], shared: Shared) -> dict[str, dict[str, str]]:
    """With what the training and test rows of a data set begin, by split and id, as far as LOOKS_S seconds reach."""
    texts: dict[str, dict[str, str]] = {"train": {}, "test": {}}
    rows = [of_split(questions, split) for split in texts]
    ends = time.monotonic() + LOOKS_S
    with suppress(WorldFault):
        for row in chain.from_iterable(zip_longest(*rows) if all(rows) else ()):
            if row and time.monotonic() < ends:
                env = shared.run(opened(KINDS[row.env].env(row, shared, 0)))
                texts[row.split][row.question_id] = _OWN_SEED.sub("", env.user, count=1)
    return texts


def played_by(
    name: str, attempts: Sequence[Attempt], questions: Sequence[Question], seed: int
) -> tuple[list[Attempt], list[Iterable[str]]]:
    """The attempts and who plays each: `random`, `oracle` or `demonstrator`; ValueError where nobody does."""
    env = {question.question_id: question.env for question in questions}
    played = []
    for attempt in attempts:
        script = scripts_of(env[attempt.question_id]).get(name)
        if script is None:
            games = ", ".join(kind for kind in KINDS if name in KINDS[kind].scripts)
            raise ValueError(f"nobody plays {env[attempt.question_id]!r} as {name!r} does, only {games}")
        played.append(scripted(attempt, script, seed))
    return [attempt for attempt, _ in played], [player for _, player in played]
