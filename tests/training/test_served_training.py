"""A training whose sampler is a stock server of vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

from agent_r1.training.loop import Training, iterate
from tests.fixtures import Task

GRPO = {
    "iterations": 3,
    "credit": {"estimator": "grpo"},
    "update": {"learning_rate": 1e-3},
    "rollout": {"questions": 4, "samples": 8},
}


def test_a_server_samples_a_training_whose_every_update_is_proved(
    one_action_task: Callable[..., Task],
    open_training: Callable[..., AbstractContextManager[Training]],
    engine_server: str,
) -> None:
    """That a server gives the bits of a process is in tests/rollout/test_vllm_engine.py."""
    rng = random.Random(0)
    answers = {f"Is it true of {name}?": "yes" for name in "ABCD"}
    task = one_action_task(answers, lambda _: f"<answer> {rng.choice(['yes', 'no'])} </answer>")
    engine = {"kind": "server", "server": {"urls": [engine_server]}}
    with open_training(task, dict(GRPO), engine=engine) as training:
        iterate(training)
    lines = training.folder.history()
    assert training.learner.policy_version == 3
    assert [line["rollout/canary_gap"] < 1e-4 for line in lines] == [True] * 3
    assert [line["policy/mismatch_max"] < 1e-4 for line in lines] == [True] * 3
