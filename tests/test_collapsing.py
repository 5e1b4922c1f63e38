"""A collapse that is provoked: the whole loop with a learning rate far too high, on a task of one action."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.credit.collapse import alarms
from agent_r1.params import load
from agent_r1.training.loop import iterate

TRAIN = load(Path(__file__).parents[1] / "params.yaml").train
NAMES = "ABCDEFGH"
History = Callable[[float, int], list[dict[str, float]]]


@pytest.fixture(scope="module")
def task(one_action_task: Callable[..., Any]) -> Any:
    """Repeating the letter that a question names, and a model that was shown the right one and any equally often."""
    rng = random.Random(0)
    return one_action_task(
        {f"Say {name}": name for name in NAMES},
        lambda right: f"<answer>{rng.choice([right, rng.choice(NAMES)])}</answer>",
    )


@pytest.fixture
def history(task: Any, open_training: Callable[..., Any]) -> History:
    """The metrics of a GRPO run with a learning rate and a number of iterations."""

    def run(learning_rate: float, iterations: int) -> list[dict[str, float]]:
        changes = {
            "iterations": iterations,
            "credit": {"estimator": "grpo"},
            "update": {"learning_rate": learning_rate},
        }
        with open_training(task, changes) as training:
            iterate(training)
            return list(training.folder.history())

    return run


def seen(rows: list[dict[str, float]]) -> list[set[str]]:
    """The signs that are alarms after each iteration, under the project's own thresholds."""
    return [{alarm.sign for alarm in alarms(rows[:n], TRAIN.monitor, samples=8)} for n in range(1, len(rows) + 1)]


def test_a_run_that_learns_shows_no_alarm(history: History) -> None:
    """The reward rises from about .5 to above .7."""
    rows = history(3e-4, 12)
    assert np.mean([row["reward/total"] for row in rows[-4:]]) > rows[0]["reward/total"] + 0.1
    assert not any(seen(rows))
    assert not any(row["monitor/alarms"] for row in rows)


def test_a_learning_rate_far_too_high_is_noticed_as_soon_as_patience_allows(history: History) -> None:
    """The first update leaves nothing of the reward; the last of the next `patience` iterations raises the alarm.

    The run is warned, and goes on.
    """
    *rows, _ = history(1.5e-2, 2 + TRAIN.monitor.patience)
    assert len(rows) == 1 + TRAIN.monitor.patience
    assert rows[0]["reward/total"] > 0.3
    assert rows[1]["reward/total"] < -0.9
    *before, at_last = seen(rows)
    assert not any(before)
    assert "reward_std_fall" in at_last
    assert [bool(row["monitor/alarms"]) for row in rows] == [*(False for _ in before), True]
