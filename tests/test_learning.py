"""The whole loop learns: an engine acts, credit is assigned, a learner updates, and the engine takes its weights.

The task has one thing to learn. The warm start says yes and no half of the time each, and only yes is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_r1.credit.assign import assign
from agent_r1.params import UpdateParams, load
from agent_r1.policy.learner import Learner
from agent_r1.records import Trajectory
from agent_r1.rollout.canary import StaleWeightsError, prove
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episodes import Attempt, collect
from agent_r1.rollout.sampling import Engine

PARAMS = load(Path(__file__).parents[1] / "params.yaml")
LIMITS = {"max_tokens": 128, "max_action_tokens": 16}
ITERATIONS, NAMES, SAMPLES = 24, "ABCDEFGH", 8
pytestmark = pytest.mark.usefixtures("one_thread")


Attempts = Callable[[int], list[Attempt]]


@pytest.fixture(scope="module")
def attempts(one_action_attempts: Callable[..., list[Attempt]]) -> Attempts:
    """Groups of attempts at questions that differ in a name and are all to be answered with yes."""
    answers = {f"Is it true of {name}?": "yes" for name in NAMES}
    return lambda iteration: one_action_attempts(answers, iteration, SAMPLES)


@pytest.fixture(scope="module")
def undecided(attempts: Attempts, warm_started: Callable[..., Path]) -> Path:
    """A model that was shown yes and no equally often."""
    rng = random.Random(0)
    shown = [attempt for iteration in range(8) for attempt in attempts(iteration)]
    return warm_started(shown, [f"<answer> {rng.choice(['yes', 'no'])} </answer>" for _ in shown], **LIMITS)


def update_params() -> UpdateParams:
    changes = {"learning_rate": 2e-4, "critic_learning_rate": 5e-4, "critic_warmup_iterations": 1, "minibatches": 4}
    return PARAMS.train.update.model_copy(update=changes)


@pytest.fixture(scope="module")
def engine(undecided: Path, chat: Chat) -> Iterator[Engine]:
    with open_engine(
        PARAMS.engine, undecided, end_id=chat.end_id, max_tokens=128, temperature=1.0, dtype="auto"
    ) as engine:
        yield engine


class Loop:
    """What `flows.train` does in an iteration, without the files."""

    def __init__(
        self, engine: Engine, chat: Chat, attempts: Attempts, model: Path, folder: Path, estimator: str
    ) -> None:
        self.engine, self.chat, self.attempts, self.folder = engine, chat, attempts, folder
        self.credit = PARAMS.train.credit.model_copy(update={"estimator": estimator})
        self.learner = Learner(model, update_params(), PARAMS.model, with_critic=estimator == "gae", seed=0)
        engine.load_weights(model, 0)

    def collect(self, iteration: int) -> list[Trajectory]:
        """Samples, and proves which weights did."""
        trajectories = collect(self.engine, self.chat, self.attempts(iteration), **LIMITS, seed=0, iteration=iteration)
        prove(
            [each.logprobs[each.action_mask] for each in trajectories],
            [
                own[each.action_mask]
                for own, each in zip(self.learner.logprobs(trajectories), trajectories, strict=True)
            ],
            dtype=torch.float32,
            tolerance=PARAMS.train.update.canary_tolerance,
        )
        return trajectories

    def learn(self, trajectories: list[Trajectory], iteration: int) -> None:
        values = self.learner.values(trajectories) if self.learner.critic else None
        credits_, _ = assign(trajectories, values, self.credit)
        self.learner.update(trajectories, credits_, iteration)

    def transfer(self) -> None:
        self.learner.save_policy(self.folder)
        self.engine.load_weights(self.folder, self.learner.policy_version)


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_what_is_rewarded_is_done_more_often(
    engine: Engine, undecided: Path, chat: Chat, attempts: Attempts, tmp_path: Path, estimator: str
) -> None:
    """From about .5 to above .9; with the sign of the advantage flipped it falls to 0."""
    loop, shares = Loop(engine, chat, attempts, undecided, tmp_path, estimator), []
    for iteration in range(ITERATIONS):
        trajectories = loop.collect(iteration)
        shares.append(np.mean([trajectory.answer == "yes" for trajectory in trajectories]))
        loop.learn(trajectories, iteration)
        loop.transfer()
    assert 0.3 < shares[0] < 0.7
    assert np.mean(shares[-4:]) > 0.9, shares


def test_weights_that_were_not_transferred_are_noticed(
    engine: Engine, undecided: Path, chat: Chat, attempts: Attempts, tmp_path: Path
) -> None:
    loop = Loop(engine, chat, attempts, undecided, tmp_path, "grpo")
    loop.learn(loop.collect(0), 0)
    with pytest.raises(StaleWeightsError):
        loop.collect(1)
    loop.transfer()
    loop.collect(1)
