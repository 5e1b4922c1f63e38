"""A collapse that is provoked: the whole loop with a learning rate far too high, on a task of one action.

The sampler is plain transformers, so that the loop takes seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from agent_r1.credit.assign import assign
from agent_r1.credit.collapse import Row, alarms
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.params import load
from agent_r1.policy.builtin import new_model
from agent_r1.policy.learner import Learner
from agent_r1.policy.warm_start import fit
from agent_r1.records import Question
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import Attempt, collect
from agent_r1.rollout.scripted import ScriptedSampler

TRAIN = load(Path(__file__).parents[1] / "params.yaml").train
LIMITS = {"max_tokens": 128, "max_action_tokens": 16}
NAMES = "ABCDEFGH"
SAMPLES = 8


def attempts(iteration: int) -> list[Attempt]:
    """Groups of attempts at repeating the letter that the question names."""
    questions = [
        Question(
            question_id=f"{iteration}-{name}",
            dataset="test",
            split="train",
            text=f"Say {name}",
            answers=[name],
            gold_titles=[],
            hops=1,
            kind="lookup",
        )
        for name in NAMES
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
    """A model that was shown the right letter and any letter equally often."""
    rng = random.Random(0)
    shown = [attempt for iteration in range(8) for attempt in attempts(iteration)]
    scripts = [[f"<answer>{rng.choice([NAMES[each.group], rng.choice(NAMES)])}</answer>"] for each in shown]
    demonstrations = collect(ScriptedSampler(scripts, chat), chat, shown, **LIMITS, seed=0)
    shape = new_model(tiny_tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=LIMITS["max_tokens"], seed=0).config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(shape)
    warm_start = load(Path(__file__).parents[1] / "params.yaml").warm_start
    changes = {"batch_size": 32, "steps": 200, "learning_rate": 2e-3, "observation_weight": 0.0}
    fit(model, demonstrations, warm_start.model_copy(update=changes))
    folder = tmp_path_factory.mktemp("undecided")
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def history(
    model: Path, chat: Chat, torch_engine: type[Any], folder: Path, *, learning_rate: float, iterations: int
) -> list[Row]:
    """The metrics of a GRPO run, as `flows.train` makes them."""
    update = TRAIN.update.model_copy(update={"learning_rate": learning_rate, "minibatches": 4})
    learner = Learner(model, update, with_critic=False, seed=0)
    engine = torch_engine(model, end_id=chat.end_id, max_tokens=LIMITS["max_tokens"])
    rows: list[Row] = []
    for iteration in range(iterations):
        trajectories = collect(engine, chat, attempts(iteration), **LIMITS, seed=0, iteration=iteration)
        credits_, metrics = assign(trajectories, None, TRAIN.credit.model_copy(update={"estimator": "grpo"}))
        rows.append(metrics | learner.update(trajectories, credits_, iteration))
        learner.save_policy(folder)
        engine.load_weights(folder, learner.policy_version)
    return rows


def seen(rows: list[Row]) -> list[set[str]]:
    """The signs that are alarms after each iteration, under the project's own thresholds."""
    return [
        {alarm.sign for alarm in alarms(rows[:count], TRAIN.monitor, samples=SAMPLES)}
        for count in range(1, len(rows) + 1)
    ]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More make so small a model slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_run_that_learns_shows_no_alarm(undecided: Path, chat: Chat, torch_engine: type[Any], tmp_path: Path) -> None:
    """The reward rises from about .5 to above .7."""
    rows = history(undecided, chat, torch_engine, tmp_path, learning_rate=3e-4, iterations=12)
    assert np.mean([row["reward/total"] for row in rows[-4:]]) > rows[0]["reward/total"] + 0.1
    assert not any(seen(rows))


@pytest.mark.parametrize("learning_rate", [1.5e-2, 5e-2])
def test_a_learning_rate_far_too_high_is_noticed_as_soon_as_patience_allows(
    undecided: Path, chat: Chat, torch_engine: type[Any], tmp_path: Path, learning_rate: float
) -> None:
    """The first update leaves nothing of the reward; the last of the next `patience` iterations raises the alarm."""
    patience = TRAIN.monitor.patience
    rows = history(undecided, chat, torch_engine, tmp_path, learning_rate=learning_rate, iterations=1 + patience)
    assert rows[0]["reward/total"] > 0.3
    assert rows[1]["reward/total"] < -0.9
    *before, at_last = seen(rows)
    assert not any(before)
    assert "reward_std_fall" in at_last
