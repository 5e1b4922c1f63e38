"""The whole loop learns: an engine acts, credit is assigned, a learner updates, and the engine takes its weights.

The task has one thing to learn. The warm start says yes and no half of the time each, and only yes is right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from agent_r1.credit.assign import assign
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.params import UpdateParams, WarmStartParams, load
from agent_r1.policy.builtin import new_model
from agent_r1.policy.learner import Learner
from agent_r1.policy.warm_start import fit
from agent_r1.records import Question, Trajectory
from agent_r1.rollout.canary import StaleWeightsError, prove
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engine import Engine
from agent_r1.rollout.episodes import Attempt, collect
from agent_r1.rollout.scripted import ScriptedSampler

PARAMS = load(Path(__file__).parents[1] / "params.yaml")
LIMITS = {"max_tokens": 128, "max_action_tokens": 16}
ITERATIONS, QUESTIONS, SAMPLES = 24, 8, 8


def attempts(iteration: int) -> list[Attempt]:
    """Groups of attempts at questions that differ in a name and are all to be answered with yes."""
    questions = [
        Question(
            question_id=f"{iteration}-{i}",
            dataset="test",
            split="train",
            text=f"Is it true of {'ABCDEFGH'[i]}?",
            answers=["yes"],
            gold_titles=[],
            hops=1,
            kind="lookup",
        )
        for i in range(QUESTIONS)
    ]
    return [
        Attempt(question_id=question.question_id, group=group, sample=sample, env=ToolEnv(question, [], max_steps=1))
        for group, question in enumerate(questions)
        for sample in range(SAMPLES)
    ]


@pytest.fixture(scope="module")
def chat(tiny_tokenizer: PreTrainedTokenizerFast) -> Chat:
    return Chat(tiny_tokenizer)


@pytest.fixture(scope="module")
def undecided(tiny_tokenizer: PreTrainedTokenizerFast, chat: Chat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model from plain random weights that was shown yes and no equally often."""
    rng = random.Random(0)
    shown = [attempt for iteration in range(8) for attempt in attempts(iteration)]
    scripts = [[f"<answer> {rng.choice(['yes', 'no'])} </answer>"] for _ in shown]
    demonstrations = collect(ScriptedSampler(scripts, chat), chat, shown, **LIMITS, seed=0)
    shape = new_model(tiny_tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=LIMITS["max_tokens"], seed=0).config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(shape)
    fit(model, demonstrations, warm_start_params())
    folder = tmp_path_factory.mktemp("undecided")
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def warm_start_params() -> WarmStartParams:
    changes = {"batch_size": 32, "steps": 200, "learning_rate": 2e-3, "observation_weight": 0.0}
    return PARAMS.warm_start.model_copy(update=changes)


def update_params() -> UpdateParams:
    changes = {"learning_rate": 2e-4, "critic_learning_rate": 5e-4, "critic_warmup_iterations": 1, "minibatches": 4}
    return PARAMS.train.update.model_copy(update=changes)


@pytest.fixture(scope="module")
def engine(undecided: Path, chat: Chat) -> Iterator[Engine]:
    with Engine(undecided, end_id=chat.end_id, max_tokens=LIMITS["max_tokens"]) as engine:
        yield engine


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More make so small a model slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Loop:
    """What `flows.train` does in an iteration, without the files."""

    def __init__(self, engine: Engine, chat: Chat, model: Path, folder: Path, estimator: str) -> None:
        self.engine, self.chat, self.folder = engine, chat, folder
        self.credit = PARAMS.train.credit.model_copy(update={"estimator": estimator})
        self.learner = Learner(model, update_params(), with_critic=estimator == "gae", seed=0)
        engine.load_weights(model, 0)

    def collect(self, iteration: int) -> list[Trajectory]:
        """Samples, and proves which weights did."""
        trajectories = collect(self.engine, self.chat, attempts(iteration), **LIMITS, seed=0, iteration=iteration)
        prove(
            [each.logprobs[each.action_mask] for each in trajectories],
            [
                own[each.action_mask]
                for own, each in zip(self.learner.logprobs(trajectories), trajectories, strict=True)
            ],
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
    engine: Engine, undecided: Path, chat: Chat, tmp_path: Path, estimator: str
) -> None:
    """From about .5 to above .9; with the sign of the advantage flipped it falls to 0."""
    loop, shares = Loop(engine, chat, undecided, tmp_path, estimator), []
    for iteration in range(ITERATIONS):
        trajectories = loop.collect(iteration)
        shares.append(np.mean([trajectory.answer == "yes" for trajectory in trajectories]))
        loop.learn(trajectories, iteration)
        loop.transfer()
    assert 0.3 < shares[0] < 0.7
    assert np.mean(shares[-4:]) > 0.9, shares


def test_weights_that_were_not_transferred_are_noticed(
    engine: Engine, undecided: Path, chat: Chat, tmp_path: Path
) -> None:
    loop = Loop(engine, chat, undecided, tmp_path, "grpo")
    loop.learn(loop.collect(0), 0)
    with pytest.raises(StaleWeightsError):
        loop.collect(1)
    loop.transfer()
    loop.collect(1)
