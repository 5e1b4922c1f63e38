"""A collapse that is provoked: the whole loop with a learning rate far too high, on a task of one action.

The sampler is plain transformers, so that the loop takes seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agent_r1.credit.assign import assign
from agent_r1.credit.collapse import Metrics, alarms
from agent_r1.params import load
from agent_r1.policy.learner import Learner
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import Attempt, collect
from agent_r1.rollout.transformers_engine import TransformersEngine

PARAMS = load(Path(__file__).parents[1] / "params.yaml")
TRAIN = PARAMS.train
LIMITS = {"max_tokens": 128, "max_action_tokens": 16}
NAMES = "ABCDEFGH"
SAMPLES = 8
pytestmark = pytest.mark.usefixtures("one_thread")


Attempts = Callable[[int], list[Attempt]]


@pytest.fixture(scope="module")
def attempts(one_action_attempts: Callable[..., list[Attempt]]) -> Attempts:
    """Groups of attempts at repeating the letter that the question names."""
    answers = {f"Say {name}": name for name in NAMES}
    return lambda iteration: one_action_attempts(answers, iteration, SAMPLES)


@pytest.fixture(scope="module")
def undecided(attempts: Attempts, warm_started: Callable[..., Path]) -> Path:
    """A model that was shown the right letter and any letter equally often."""
    rng = random.Random(0)
    shown = [attempt for iteration in range(8) for attempt in attempts(iteration)]
    actions = [f"<answer>{rng.choice([NAMES[each.group], rng.choice(NAMES)])}</answer>" for each in shown]
    return warm_started(shown, actions, **LIMITS)


def history(
    model: Path,
    chat: Chat,
    attempts: Attempts,
    folder: Path,
    *,
    learning_rate: float,
    iterations: int,
) -> list[Metrics]:
    """The metrics of a GRPO run, as `flows.train` makes them."""
    update = TRAIN.update.model_copy(update={"learning_rate": learning_rate, "minibatches": 4})
    learner = Learner(model, update, PARAMS.model, with_critic=False, seed=0)
    engine = TransformersEngine(model, end_id=chat.end_id, max_tokens=LIMITS["max_tokens"])
    rows: list[Metrics] = []
    for iteration in range(iterations):
        trajectories = collect(engine, chat, attempts(iteration), **LIMITS, seed=0, iteration=iteration)
        credits_, metrics = assign(trajectories, None, TRAIN.credit.model_copy(update={"estimator": "grpo"}))
        rows.append(metrics | learner.update(trajectories, credits_, iteration))
        learner.save_policy(folder)
        engine.load_weights(folder, learner.policy_version)
    return rows


def seen(rows: list[Metrics]) -> list[set[str]]:
    """The signs that are alarms after each iteration, under the project's own thresholds."""
    return [
        {alarm.sign for alarm in alarms(rows[:count], TRAIN.monitor, samples=SAMPLES)}
        for count in range(1, len(rows) + 1)
    ]


def test_a_run_that_learns_shows_no_alarm(undecided: Path, chat: Chat, attempts: Attempts, tmp_path: Path) -> None:
    """The reward rises from about .5 to above .7."""
    rows = history(undecided, chat, attempts, tmp_path, learning_rate=3e-4, iterations=12)
    assert np.mean([row["reward/total"] for row in rows[-4:]]) > rows[0]["reward/total"] + 0.1
    assert not any(seen(rows))


@pytest.mark.parametrize("learning_rate", [1.5e-2, 5e-2])
def test_a_learning_rate_far_too_high_is_noticed_as_soon_as_patience_allows(
    undecided: Path, chat: Chat, attempts: Attempts, tmp_path: Path, learning_rate: float
) -> None:
    """The first update leaves nothing of the reward; the last of the next `patience` iterations raises the alarm."""
    patience = TRAIN.monitor.patience
    rows = history(undecided, chat, attempts, tmp_path, learning_rate=learning_rate, iterations=1 + patience)
    assert rows[0]["reward/total"] > 0.3
    assert rows[1]["reward/total"] < -0.9
    *before, at_last = seen(rows)
    assert not any(before)
    assert "reward_std_fall" in at_last
