"""Every stage on questions in a release format, with hybrid search.

The questions are real ones where there are any, else some made here.
"""

import json
from pathlib import Path
from typing import Any

from agent_r1.params import load
from agent_r1.params.places import RunId
from agent_r1.records import CallStatus, Passage, Question
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows
from flows.commands.execute import index, prepare
from flows.evaluate import EvaluationRequest, evaluate
from flows.train import train
from flows.warm_start import warm_start
from tests.cases import laid
from tests.fixtures import PLACES, Inside, WriteParams
from tests.reading import metrics, predictions, trajectories

REAL = Path(__file__).parents[2].parent / "shared/data/multihop/musique"
FILES = ("musique_ans_v1.0_train.subset.jsonl.gz", "musique_ans_v1.0_dev.subset.jsonl.gz")
CHANGES = laid("real_data")


def musique_row(i: int) -> dict[str, Any]:
    paragraphs = {
        f"Film {i}": f"Film {i} is a film. It was directed by Person {i}.",
        f"Person {i}": f"Person {i} is a director. They were born in Town {i}.",
        f"River {i}": "A river.",
    }
    return {
        "id": f"2hop__{i}_{i}",
        "question": f"In which town was the director of Film {i} born?",
        "answer": f"Town {i}",
        "answer_aliases": [f"The town {i}"],
        "answerable": True,
        "question_decomposition": [{"id": 2 * i}, {"id": 2 * i + 1}],
        "paragraphs": [
            {"idx": at, "title": title, "paragraph_text": text, "is_supporting": at < 2}
            for at, (title, text) in enumerate(paragraphs.items())
        ],
    }


def release(folder: Path) -> dict[str, Any]:
    paths = [REAL / file for file in FILES]
    if not REAL.is_dir():
        paths = [folder / file.removesuffix(".gz") for file in FILES]
        for path, first in zip(paths, (0, 24), strict=True):
            path.write_text("\n".join(json.dumps(musique_row(i)) for i in range(first, first + 24)))
    train, test = ({"file": str(path), "questions": 24} for path in paths)
    return {"format": "musique", "train": train, "test": test}


def test_stages_run_on_a_release(tmp_path: Path, tiny_encoder: Path, inside: Inside, write_params: WriteParams) -> None:
    search = {"kind": "hybrid", "dense": {"encoder": str(tiny_encoder), "max_tokens": 32}}
    data = {"datasets": ["musique"], "files": {"musique": release(tmp_path)}}
    env = CHANGES["env"] | ({} if REAL.is_dir() else {"top_k": 20})  # a random encoder ranks many short passages alike
    write_params(tmp_path, {**CHANGES, "prepare": data, "search": search, "env": env})
    with inside(tmp_path):
        prepare()
        index()
        warm_start()
        train(RunId("ppo"))
        evaluate(EvaluationRequest(RunId("ppo")))
        rows = read_rows(PLACES.questions, Question)
        [found] = open_index(load(Path("params.yaml")).search, PLACES.passages, PLACES.index).search([rows[0].text], 1)
        assert found, "what a call of the policy would be answered"
    questions = {row.question_id: row for row in rows}
    splits = [row.split for row in rows]
    assert [splits.count(split) for split in ("train", "dev", "test")] == [24, 0, 24]
    titles = {row.title for row in read_rows(tmp_path / PLACES.passages, Passage)}
    assert all(title in titles for row in rows for title in row.gold_titles)
    run = tmp_path / PLACES.training(RunId("ppo"))
    sampled = trajectories(run)
    assert [{row.policy_version for row in collected} for collected in sampled] == [{0}, {1}]
    assert {questions[row.question_id].split for collected in sampled for row in collected} == {"train"}
    statuses = {step.call_status for collected in sampled for row in collected for step in row.steps}
    assert not statuses & {CallStatus.FAILED, CallStatus.TIMEOUT}
    assert all(max(row["policy/mismatch_max"], row["rollout/canary_gap"]) <= 1e-4 for row in metrics(run))
    graded = predictions(tmp_path / PLACES.evaluation("ppo"))
    assert {questions[row.question_id].split for row in graded} == {"test"}
    assert [row.policy_version for row in graded] == [2] * 6
