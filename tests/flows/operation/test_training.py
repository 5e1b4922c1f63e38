"""The training flow with overrides of its own: its scores are shown, and what it trains is a run of its own.

It has a lineage, though no dvc.lock knows of it.

A cancel is tested where the flow is served, and with the pipeline.
"""

from __future__ import annotations

import io
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from rich.console import Console

from agent_r1.files import sha256
from agent_r1.learn import checkpoint
from agent_r1.params import load, variant_of
from agent_r1.params.places import RunId
from flows.operation.lineage import lineage
from flows.operation.pages import scores

# The stages that a training starts from, as done as the small project has them.
DONE = "stages: {prepare: {cmd: 'true'}, index: {cmd: 'true'}, warm_start: {cmd: 'true'}}"
TRAIN = """
import os
os.chdir({folder!r})
from flows.terminal import configure_logging
from flows.operation.deployments import training
configure_logging()  # shows the stages' lines
training('ppo', 7, {further})
"""
FURTHER = {"credit": {"lam": 0.5}}
LABEL = RunId("ppo", 7, variant=variant_of(FURTHER)).label  # ppo-0a1b2c3d-seed7
ITERATIONS = 2


@pytest.fixture
def project(
    tmp_path: Path, small_project: Path, write_params: Callable[..., None], lay_dvc: Callable[..., None]
) -> Path:
    """A copy of the small project as a DVC repository, its engine in the stage's process, which starts at once."""
    folder = tmp_path / "project"
    shutil.copytree(small_project, folder, ignore=shutil.ignore_patterns("train", ".tracking", "evaluate"))
    write_params(folder, {"engine": {"kind": "transformers"}, "train": {"iterations": ITERATIONS}})
    (folder / "dvc.yaml").write_text(DONE)
    lay_dvc(folder)
    return folder


def artifacts(prefix: str) -> dict[str, str]:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(like_=f"{prefix}%")))
    return {str(artifact.key): str(artifact.data) for artifact in found}


def test_the_table_has_a_row_per_finished_iteration(tmp_path: Path) -> None:
    lines = [{"iteration": 0, "rollout/success": 0.25, "update/tokens": 7}, {"iteration": 1, "rollout/success": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = scores(tmp_path)
    assert [(row["iteration"], row["rollout/success"], row["reward/total"]) for row in rows] == [
        (0, 0.25, None),
        (1, 0.5, None),
    ]
    assert all("update/tokens" not in row for row in rows)


def trajectories_by_lineage(label: str) -> Path:
    """Brings back the trajectories of a model as its lineage says."""
    console = Console(width=300, file=io.StringIO(), record=True)
    lineage(label, console)
    [line] = [line for line in console.export_text().splitlines() if "get them" in line]
    command = shlex.split(line.partition("get them ")[2])
    subprocess.run([sys.executable, "-m", *command], check=True)
    return Path(command[-1])


def test_a_training_shows_its_scores_and_its_model_leads_to_its_trajectories(
    prefect_api: str, project: Path, start: Any, inside: Callable[[Path], AbstractContextManager[None]]
) -> None:
    folder = project / load(project / "params.yaml").places.training(RunId.parse(LABEL))
    command = TRAIN.format(folder=str(project), further=FURTHER)
    out, errors = start("-c", command, PREFECT_API_URL=prefect_api, TMPDIR=str(project.parent)).communicate()
    finished = checkpoint.progress(folder / "checkpoint")
    assert finished is not None, out + errors
    assert finished.iterations == ITERATIONS
    rows = json.loads(artifacts("scores-ppo-")[f"scores-{LABEL}"])
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
    run_id = (folder / "mlflow_run_id").read_text()
    assert f"/#/runs/{run_id}" in artifacts("mlflow-ppo-")[f"mlflow-{LABEL}"]
    shown = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db").get_run(run_id)
    assert (shown.info.run_name, json.loads(shown.data.tags["overrides"])) == (LABEL, FURTHER)
    assert shown.data.params["credit.lam"] == "0.5"

    trajectories = sha256(folder / "trajectories")
    shutil.rmtree(folder)
    with inside(project):
        assert sha256(trajectories_by_lineage(LABEL)) == trajectories
