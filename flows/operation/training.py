"""One training as a deployed flow: what it starts from, the run, its page, and what to look at."""

from __future__ import annotations

import json
from pathlib import Path

from agent_r1.project import label, train_dir
from prefect import flow
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.events import emit_event
from prefect.runtime import flow_run

from agent_r1 import params, tracking
from agent_r1.tracking.registry import MODEL, VERSION_TAG, reference_to
from flows.commands import expendable, reproduce, run_command
from flows.server import mlflow_ui

STARTS_FROM = ("prepare", "index", "warm_start")  # the stages of dvc.yaml, in their order
REGISTERED = "agent_r1.policy.registered"  # the event that prefect.yaml waits for
SHOWN = ("rollout/em", "rollout/f1", "reward/total", "rollout/valid_call_share", "rollout/tool_calls")


def _label() -> str:
    return label(flow_run.parameters["run"], flow_run.parameters["seed"])


@flow(name="training", flow_run_name=_label)
def training(run: str, seed: int | None = None) -> None:
    """Trains one run of params.yaml, or goes on where an earlier attempt was interrupted; then makes its viewer.

    Data, index and warm start are brought up to date first, as `dvc repro` would. A viewer that fails fails nothing.

    Args:
        run: a name under `runs:`.
        seed: in place of the run's own; its outputs get folders of their own.

    Raises:
        ValueError: there is no such run.
        StageFailed: the command of another stage failed.
    """
    params.load().run(run, seed)
    for stage in STARTS_FROM:
        reproduce(stage)
    member = ["--run", run, *([] if seed is None else ["--seed", str(seed)])]
    run_command("train", *member)
    registered = _registered(train_dir(run, seed))
    _show(train_dir(run, seed))
    with expendable("the training has no new page of its trajectories"):
        run_command("view", *member)
    emit_event(REGISTERED, {"prefect.resource.id": f"{MODEL}.{label(run, seed)}"}, payload={"model": registered})


def _registered(folder: Path) -> str:
    """The reference of the version that a training has just registered, which a later one of its label leaves alone."""
    tracked = tracking.resume((folder / "mlflow_run_id").read_text())
    assert tracked is not None, "the training has logged to it"
    return reference_to(tracked.tags()[VERSION_TAG])


def _show(folder: Path) -> None:
    """Prefect artifacts: the scores by iteration, and where the run is in MLflow."""
    key = folder.name.lower().replace("_", "-")
    create_table_artifact(scores(folder), key=f"scores-{key}", description=f"Scores of {folder.name}, by iteration")
    create_link_artifact(
        f"{mlflow_ui()}/#/runs/{(folder / 'mlflow_run_id').read_text()}",
        link_text=f"{folder.name} in MLflow",
        key=f"mlflow-{key}",
        description=f"The run of {folder.name}: curves, parameters, viewer",
    )


def scores(folder: Path) -> list[dict[str, float | None]]:
    """What the table shows of a run: a row per finished iteration."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line.get(name) for name in ("iteration", *SHOWN)} for line in lines]
