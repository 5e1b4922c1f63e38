"""A training whose sampler is a stock server of vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from agent_r1.records import Trajectory
from agent_r1.tables import read_rows
from agent_r1.training.folder import RunFolder
from agent_r1.training.loop import Training, iterate
from tests.fixtures import Task

GRPO = {
    "iterations": 3,
    "credit": {"estimator": "grpo"},
    "update": {"learning_rate": 1e-3},
    "rollout": {"questions": 4, "samples": 8},
}


def sampled(folder: RunFolder) -> list[list[int]]:
    """The token ids of all trajectories."""
    rows = [row for each in range(folder.finished) for row in read_rows(folder.trajectories(each), Trajectory)]
    return [row.token_ids.tolist() for row in rows]


def test_a_server_samples_a_training_as_a_process_does_and_every_update_is_proved(
    one_action_task: Callable[..., Task],
    open_training: Callable[..., AbstractContextManager[Training]],
    engine_server: str,
    tmp_path: Path,
) -> None:
    rng = random.Random(0)
    answers = {f"Is it true of {name}?": "yes" for name in "ABCD"}
    task = one_action_task(answers, lambda _: f"<answer> {rng.choice(['yes', 'no'])} </answer>")
    found, versions = list[tuple[list[list[int]], list[float]]](), list[int]()
    engines: list[dict[str, Any]] = [{"kind": "vllm"}, {"kind": "server", "server": {"urls": [engine_server]}}]
    for engine in engines:
        with open_training(task, dict(GRPO), engine=engine) as training:
            iterate(training)
        lines = training.folder.history()
        found.append((sampled(training.folder), [line["rollout/canary_gap"] for line in lines]))
        versions.append(training.learner.policy_version)
        (tmp_path / "run").rename(tmp_path / engine["kind"])
    (own, gaps), (served, served_gaps) = found
    assert own == served
    assert versions == [3, 3]
    assert gaps == pytest.approx(served_gaps, abs=1e-4)
