"""The whole loop learns: an engine acts, credit is assigned, a learner updates, and the engine takes its weights.

The task has one thing to learn. The warm start says yes and no half of the time each, and only yes is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agent_r1.records import Trajectory
from agent_r1.tables import read_rows
from agent_r1.training.loop import Training, iterate
from agent_r1.training.watch import StaleWeightsError, judge

ITERATIONS = 24
UPDATE = {
    "learning_rate": 2e-4,
    "critic": {"learning_rate": 5e-4, "warmup": {"iterations": 1, "explained_variance": 0, "limit": 0}},
}


@pytest.fixture(scope="module")
def task(one_action_task: Callable[..., Any]) -> Any:
    """Questions that differ in a name and are all to be answered with yes, and a model that says yes and no."""
    rng = random.Random(0)
    answers = {f"Is it true of {name}?": "yes" for name in "ABCDEFGH"}
    return one_action_task(answers, lambda _: f"<answer> {rng.choice(['yes', 'no'])} </answer>")


def share_of_yes(training: Training, iteration: int) -> float:
    rows = read_rows(training.folder.trajectories(iteration), Trajectory)
    return float(np.mean([row.answer == "yes" for row in rows]))


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_what_is_rewarded_is_done_more_often(task: Any, open_training: Callable[..., Any], estimator: str) -> None:
    """From about .5 to above .9; with the sign of the advantage flipped it falls to 0."""
    changes = {"iterations": ITERATIONS, "credit": {"estimator": estimator}, "update": UPDATE}
    with open_training(task, changes) as training:
        iterate(training)
    shares = [share_of_yes(training, iteration) for iteration in range(ITERATIONS)]
    assert 0.3 < shares[0] < 0.7
    assert np.mean(shares[-4:]) > 0.9, shares


def test_weights_that_were_not_transferred_are_noticed(
    task: Any, open_training: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_training(task, {"credit": {"estimator": "grpo"}, "update": UPDATE}) as training:
        metrics = training.rollout(0) | training.credit(0) | training.update(0)
        training.conclude(0, judge([metrics], training.config, rollbacks=0))
        with monkeypatch.context() as patch:
            patch.setattr(training.engine, "load_weights", lambda *_: None)
            with pytest.raises(StaleWeightsError):
                training.rollout(1)
        training.rollout(1)
