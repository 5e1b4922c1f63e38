"""Training and evaluation without vLLM in a process of its own: two iterations with each of the other engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from agent_r1.project import WARM_START, evaluate_dir, train_dir
from transformers import PreTrainedTokenizerFast

from agent_r1.policy.builtin import new_model
from agent_r1.records import Prediction, Trajectory
from agent_r1.tables import read_rows
from flows.evaluate import evaluate
from flows.index import index
from flows.prepare import prepare
from flows.train import train

MAX_TOKENS = 1024


@pytest.mark.parametrize("kind", ["transformers", "server"])
def test_two_iterations_and_an_evaluation(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    inside: Callable[[Path], AbstractContextManager[None]],
    write_params: Callable[[Path, dict[str, Any]], None],
) -> None:
    """On a model that says anything. Sampler and learner agree after every transfer, or training would stop."""
    urls = [request.getfixturevalue("engine_server")] if kind == "server" else []
    changes = {
        "engine": {"kind": kind, "server": {"urls": urls}},
        "env": {"max_steps": 2, "max_tokens": MAX_TOKENS, "max_action_tokens": 8},
        "train": {"iterations": 2, "update": {"critic_warmup_iterations": 0, "learning_rate": 1e-3}},
        "evaluate": {"questions": 6},
    }
    write_params(tmp_path, changes)
    model = new_model(tiny_tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=MAX_TOKENS, seed=0)
    model.save_pretrained(tmp_path / WARM_START)
    tiny_tokenizer.save_pretrained(tmp_path / WARM_START)
    with inside(tmp_path):
        prepare()
        index()
        train("ppo")
        evaluate("ppo")
    run = tmp_path / train_dir("ppo")
    versions = [
        {row.policy_version for row in read_rows(run / "trajectories" / f"{iteration:03d}.parquet", Trajectory)}
        for iteration in range(2)
    ]
    assert versions == [{0}, {1}]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/canary_gap"] <= 1e-4 for row in metrics] == [True, True]
    predictions = read_rows(tmp_path / evaluate_dir("ppo") / "predictions.parquet", Prediction)
    assert [row.policy_version for row in predictions] == [2] * 6
