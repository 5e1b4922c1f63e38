"""Every stage on questions in the release formats, each with another kind of search.

The questions are real ones where there are any, else some made here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.params import load
from agent_r1.params.places import RunId
from agent_r1.records import CallStatus, Passage, Prediction, Question, Source, Trajectory
from agent_r1.search.index import describe, open_index
from agent_r1.tables import read_rows
from flows.commands.execute import index, prepare
from flows.evaluate import EvaluationRequest, evaluate
from flows.train import train
from flows.warm_start import warm_start

PLACES = load(Path(__file__).parents[2] / "params.yaml").places

REAL = Path(__file__).parents[2].parent / "shared/data/multihop"
FILES = {
    "hotpotqa": ("hotpot_train_v1.1.subset.json.gz", "hotpot_dev_distractor_v1.subset.json.gz"),
    "musique": ("musique_ans_v1.0_train.subset.jsonl.gz", "musique_ans_v1.0_dev.subset.jsonl.gz"),
}
MADE_WITH = [("hotpotqa", "remote"), ("musique", "hybrid")]  # 2Wiki's rows are HotpotQA's; BM25 is everywhere else
CHANGES = {
    "warm_start": {"demonstrations": 48, "naive_rag_demonstrations": 8, "batch_size": 8, "steps": 4},
    "env": {"top_k": 3, "max_steps": 4, "max_tokens": 3000, "max_result_characters": 1200, "max_action_tokens": 96},
    "train": {
        "iterations": 2,
        "rollout": {"questions": 6},
        "update": {"critic": {"warmup": {"iterations": 0, "explained_variance": 0, "limit": 0}}},
    },
    "evaluate": {"questions": 6},
}


def wiki_row(i: int, kind: str) -> dict[str, Any]:
    """A question over two paragraphs, with a third that has nothing to do with them, as HotpotQA and 2Wiki have it."""
    return {
        "_id": f"row{i}",
        "question": f"In which town was the director of Film {i} born?",
        "answer": f"Town {i}",
        "type": kind,
        "supporting_facts": [[f"Film {i}", 0], [f"Person {i}", 1]],
        "context": [
            [f"Film {i}", [f"Film {i} is a film.", f" It was directed by Person {i}."]],
            [f"Person {i}", [f"Person {i} is a director.", f" They were born in Town {i}."]],
            [f"River {i}", ["A river."]],
        ],
    }


def musique_row(i: int) -> dict[str, Any]:
    """The same as MuSiQue has it."""
    row = wiki_row(i, "")
    return {
        "id": f"2hop__{i}_{i}",
        "question": row["question"],
        "answer": row["answer"],
        "answer_aliases": [f"The town {i}"],
        "answerable": True,
        "question_decomposition": [{"id": 2 * i}, {"id": 2 * i + 1}],
        "paragraphs": [
            {"idx": at, "title": title, "paragraph_text": "".join(text), "is_supporting": at < 2}
            for at, (title, text) in enumerate(row["context"])
        ],
    }


MADE_UP: dict[str, Callable[[int], dict[str, Any]]] = {
    "hotpotqa": lambda i: wiki_row(i, "bridge"),
    "musique": musique_row,
}


def release(name: str, folder: Path) -> dict[str, Any]:
    """The parameters of a data set with 24 questions for training and for testing."""
    paths = [REAL / name / file for file in FILES[name]]
    if not REAL.is_dir():
        paths = [folder / file.removesuffix(".gz") for file in FILES[name]]
        for path, first in zip(paths, (0, 24), strict=True):
            path.write_text("\n".join(json.dumps(MADE_UP[name](i)) for i in range(first, first + 24)))
    train, test = ({"file": str(path), "questions": 24} for path in paths)
    return {"format": name, "train": train, "test": test}


@pytest.mark.parametrize(("name", "search"), MADE_WITH)
def test_the_same_stages_run_on_a_release(
    name: str,
    search: str,
    tmp_path: Path,
    tiny_encoder: Path,
    serve_index: Callable[[Path], str],
    inside: Callable[[Path], AbstractContextManager[None]],
    write_params: Callable[[Path, dict[str, Any]], None],
) -> None:
    changes = {**CHANGES, "prepare": {"datasets": [name], "files": {name: release(name, tmp_path)}}}
    write_params(tmp_path, changes)
    with inside(tmp_path):
        prepare()
        index()
        if search == "remote":
            shutil.copytree(PLACES.index, "served")
            changes["search"] = {"kind": "remote", "remote": {"url": serve_index(tmp_path / "served")}}
        elif search == "hybrid":
            changes["search"] = {"kind": "hybrid", "dense": {"encoder": str(tiny_encoder), "max_tokens": 32}}
        write_params(tmp_path, changes)
        index()
        warm_start()
        train(RunId("ppo"))
        evaluate(EvaluationRequest(RunId("ppo")))
        asked = read_rows(PLACES.questions, Question)[0].text
        [found] = open_index(load(Path("params.yaml")).search, PLACES.passages, PLACES.index).search([asked], 1)
        assert found, "what a call of the policy would be answered"
    assert describe(tmp_path / PLACES.index).kind == search
    questions = {row.question_id: row for row in read_rows(tmp_path / PLACES.questions, Question)}
    splits = [row.split for row in questions.values()]
    assert [splits.count(split) for split in ("train", "dev", "test")] == [24, 0, 24]
    titles = {row.title for row in read_rows(tmp_path / PLACES.passages, Passage)}
    assert all(title in titles for row in questions.values() for title in row.gold_titles)

    run = tmp_path / PLACES.training(RunId("ppo"))
    statuses, versions = set(), []
    for path in sorted((run / "trajectories").iterdir()):
        rows = read_rows(path, Trajectory)
        assert {questions[row.question_id].split for row in rows} == {"train"}
        versions.append({row.policy_version for row in rows})
        assert all(len(row.token_ids) <= 3000 for row in rows)
        assert all((row.logprobs[row.source == Source.ACTION] < 0).all() for row in rows)
        statuses |= {step.call_status for row in rows for step in row.steps}
    assert versions == [{0}, {1}]
    assert not statuses & {CallStatus.FAILED, CallStatus.TIMEOUT}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    assert all(np.isfinite(list(row.values())).all() for row in metrics)
    assert all(max(row["policy/mismatch_max"], row["rollout/canary_gap"]) <= 1e-4 for row in metrics)
    predictions = read_rows(tmp_path / PLACES.evaluation("ppo") / "predictions.parquet", Prediction)
    assert {questions[row.question_id].split for row in predictions} == {"test"}
    assert [row.policy_version for row in predictions] == [2] * 6
