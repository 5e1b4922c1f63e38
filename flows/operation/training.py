"""One training as a deployed flow: what it starts from, the run, its version, and what to look at."""

from __future__ import annotations

import json
from pathlib import Path

from prefect import flow
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.events import emit_event
from prefect.runtime import flow_run

from agent_r1 import params
from agent_r1.params import RunId
from agent_r1.tracking.registry import MODEL
from flows.commands import expendable, reproduce, run_command
from flows.operation.serving import mlflow_ui

STARTS_FROM = ("prepare", "index", "warm_start")  # the stages of dvc.yaml, in their order
REGISTERED = "agent_r1.policy.registered"  # the event that prefect.yaml waits for
SHOWN = ("rollout/em", "rollout/f1", "reward/total", "rollout/valid_call_share", "rollout/tool_calls")


def _label() -> str:
    return RunId(flow_run.parameters["run"], flow_run.parameters["seed"]).label


@flow(name="training", flow_run_name=_label)
def training(run: str, seed: int | None = None) -> None:
    """Trains one run of params.yaml, or goes on where an earlier attempt was interrupted; registers what it learned.

    Data, index and warm start are brought up to date first, as `dvc repro` would. At the end the run's page is made; a
    viewer that fails fails nothing. A seed takes the place of the run's own; its outputs get folders of their own.

    Raises:
        ValueError: there is no such run.
        StageFailed: the command of another stage failed.
    """
    settings, meant = params.load(), RunId(run, seed)
    settings.run(meant)
    for stage in STARTS_FROM:
        reproduce(stage)
    run_command("train", *meant.words)
    run_command("register", *meant.words)
    registered = json.loads(settings.places.version(meant).read_text())["version"]
    _show(settings.places.training(meant))
    with expendable("the training has no new page of its trajectories"):
        run_command("view", *meant.words)
    emit_event(REGISTERED, {"prefect.resource.id": f"{MODEL}.{meant.label}"}, payload={"model": registered})


def _show(folder: Path) -> None:
    """Makes Prefect artifacts: the scores by iteration, and a link to the run in MLflow."""
    key = folder.name.lower().replace("_", "-")
    create_table_artifact(scores(folder), key=f"scores-{key}", description=f"Scores of {folder.name}, by iteration")
    create_link_artifact(
        f"{mlflow_ui()}/#/runs/{(folder / 'mlflow_run_id').read_text()}",
        link_text=f"{folder.name} in MLflow",
        key=f"mlflow-{key}",
        description=f"The run of {folder.name}: curves, parameters, viewer",
    )


def scores(folder: Path) -> list[dict[str, float | None]]:
    """Reads a run's table of scores: a row per finished iteration."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line.get(name) for name in ("iteration", *SHOWN)} for line in lines]
