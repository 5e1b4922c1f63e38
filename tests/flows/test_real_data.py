"""Every stage on questions in HotpotQA's release format: real rows where there are any, else some made here."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.records import Passage, Prediction, Question, Source, Trajectory
from agent_r1.tables import read_rows
from flows.evaluate import evaluate
from flows.index import index
from flows.paths import PASSAGES, QUESTIONS, evaluate_dir, train_dir
from flows.prepare import prepare
from flows.train import train
from flows.warm_start import warm_start

REAL = Path(__file__).parents[2].parent / "shared/data/multihop/hotpotqa"
CHANGES = {
    "warm_start": {"demonstrations": 48, "naive_rag_demonstrations": 8, "batch_size": 8, "steps": 12},
    "env": {"max_steps": 3, "max_tokens": 1500, "max_action_tokens": 160},
    "train": {"iterations": 2, "rollout": {"questions": 6}, "update": {"critic_warmup_iterations": 0}},
    "evaluate": {"questions": 6},
}


def made_up_rows(first: int, count: int) -> list[dict[str, Any]]:
    """Bridge questions over two paragraphs, with a third that has nothing to do with them."""
    return [
        {
            "_id": f"row{i}",
            "question": f"In which town was the director of Film {i} born?",
            "answer": f"Town {i}",
            "type": "bridge",
            "level": "easy",
            "supporting_facts": [[f"Film {i}", 0], [f"Person {i}", 1]],
            "context": [
                [f"Film {i}", [f"Film {i} is a film.", f" It was directed by Person {i}."]],
                [f"Person {i}", [f"Person {i} is a director.", f" They were born in Town {i}."]],
                [f"River {i}", ["A river."]],
            ],
        }
        for i in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the release: train and dev."""
    if REAL.is_dir():
        return {
            "train": str(REAL / "hotpot_train_v1.1.subset.json.gz"),
            "dev": str(REAL / "hotpot_dev_distractor_v1.subset.json.gz"),
        }
    folder = tmp_path_factory.mktemp("release")
    (folder / "train.json").write_text(json.dumps(made_up_rows(0, 24)))
    (folder / "dev.json").write_text(json.dumps(made_up_rows(24, 24)))
    return {"train": str(folder / "train.json"), "dev": str(folder / "dev.json")}


def test_the_same_stages_run_on_hotpotqa(
    files: dict[str, str],
    tmp_path: Path,
    inside: Callable[[Path], AbstractContextManager[None]],
    write_params: Callable[[Path, dict[str, Any]], None],
) -> None:
    hotpotqa = {"dataset": "hotpotqa", "hotpotqa": {**files, "max_questions": 24}}
    write_params(tmp_path, {**CHANGES, "prepare": hotpotqa})
    with inside(tmp_path):
        prepare()
        index()
        warm_start()
        train("ppo")
        evaluate("ppo")
    questions = {row.question_id: row for row in read_rows(tmp_path / QUESTIONS, Question)}
    splits = [row.split for row in questions.values()]
    assert [splits.count(split) for split in ("train", "dev", "test")] == [24, 12, 12]
    titles = {row.title for row in read_rows(tmp_path / PASSAGES, Passage)}
    assert all(title in titles for row in questions.values() for title in row.gold_titles)

    run = tmp_path / train_dir("ppo")
    for path in sorted((run / "trajectories").iterdir()):
        rows = read_rows(path, Trajectory)
        assert {questions[row.question_id].split for row in rows} == {"train"}
        assert all(len(row.token_ids) <= 1500 for row in rows)
        assert all((row.logprobs[row.source == Source.ACTION] < 0).all() for row in rows)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    assert all(np.isfinite(list(row.values())).all() for row in metrics)
    assert all(max(row["policy/mismatch_max"], row["rollout/canary_gap"]) <= 1e-4 for row in metrics)
    predictions = read_rows(tmp_path / evaluate_dir("ppo") / "predictions.parquet", Prediction)
    assert {questions[row.question_id].split for row in predictions} == {"test"}
    assert [row.policy_version for row in predictions] == [2] * 6
