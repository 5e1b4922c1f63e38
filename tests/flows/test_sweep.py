"""The sweep on the small project: one run with two seeds, beside the main graph's run of the same name."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from agent_r1.params.places import RunId
from agent_r1.records import Prediction, Trajectory
from agent_r1.tables import read_rows
from flows.evaluate import EvaluationRequest, evaluate
from flows.report import report
from flows.train import train
from tests.fixtures import Inside

SEEDS = (0, 1)


@pytest.fixture(scope="module")
def swept(small_project: Path, ppo: Path, inside: Inside) -> Path:
    with inside(small_project):
        for baseline in ("base_tool_call", "naive_rag"):
            evaluate(EvaluationRequest(RunId(baseline, sweep="ablations")))
        for seed in SEEDS:
            train(RunId("ppo", seed, "ablations"))
            evaluate(EvaluationRequest(RunId("ppo", seed, "ablations")))
        report("ablations")
    return small_project


def test_members_have_their_seed_their_iterations_and_folders_of_their_own(swept: Path) -> None:
    sampled = []
    for seed in SEEDS:
        folder = swept / "outputs/ablations/train" / f"ppo-seed{seed}"
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2  # of three in the main graph
        rows = read_rows(folder / "trajectories" / "000.parquet", Trajectory)
        sampled.append([row.token_ids.tolist() for row in rows])
        predictions = read_rows(swept / "outputs/ablations/evaluate" / folder.name / "predictions.parquet", Prediction)
        assert {row.seed for row in predictions} == {seed}
    assert sampled[0] != sampled[1]
    assert len((swept / "outputs/train/ppo/metrics.jsonl").read_text().splitlines()) == 3


def test_members_are_flat_runs_tagged_with_their_sweep(swept: Path, inside: Inside) -> None:
    with inside(swept):
        client = MlflowClient(f"sqlite:///{swept}/.tracking/mlflow.db")
        experiment = client.get_experiment_by_name("agent_r1")
        found = client.search_runs([experiment.experiment_id], "tags.sweep = 'ablations'")
        assert {(run.info.run_name, run.data.params["variant"], run.data.params["seed"]) for run in found} == {
            ("ppo-seed0", "ppo", "0"),
            ("ppo-seed1", "ppo", "1"),
            ("base_tool_call", "base_tool_call", "0"),
            ("naive_rag", "naive_rag", "0"),
        }
        for run in found:
            assert "final/em" in run.data.metrics
            assert "report/report.md" in [file.path for file in client.list_artifacts(run.info.run_id, "report")]


def test_report_has_every_seed(swept: Path) -> None:
    folder = swept / "outputs/ablations/report"
    page = (folder / "report.md").read_text()
    scores = [
        json.loads((swept / f"outputs/ablations/evaluate/ppo-seed{seed}/scores.json").read_text())["em"]
        for seed in SEEDS
    ]
    assert " ".join(f"{score:.3f}" for score in scores) in page
    compared = json.loads((swept / "outputs/ablations/scores/ppo.json").read_text())
    assert compared["success"] == pytest.approx(sum(scores) / 2, abs=1e-4)
    assert "1 run with 2 seeds, " in page
