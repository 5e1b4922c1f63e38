"""What prefect.yaml deploys beside the graphs and the gate: a training, and the evaluation of registered models."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from prefect import flow
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.events import emit_event
from prefect.runtime import flow_run

from agent_r1 import params, tracking
from agent_r1.evaluation.comparison import read_curve
from agent_r1.evaluation.scores import BASE_TOOL_CALL
from agent_r1.evaluation.verdicts import Drift, drift, explain
from agent_r1.params import Params, RunId
from agent_r1.params.sections import nearest
from agent_r1.records import Question
from agent_r1.tables import read_rows
from agent_r1.tracking import registry
from agent_r1.tracking.registry import MODEL, THE_CHAMPION, Version
from flows.operation.promote import measure, previous, promote, read
from flows.operation.serving import mlflow_ui
from flows.pipeline import expendable, reproduce, run_command
from flows.policies import in_training, version_of

STARTS_FROM = ("prepare", "index", "warm_start")  # the stages of dvc.yaml, in their order
REGISTERED = "agent_r1.policy.registered"  # the event that prefect.yaml waits for
COLUMNS = ("iteration", "rollout/success", "reward/total", "rollout/valid_call_share", "rollout/tool_calls")
SHOWN = 20  # changed questions that a message names

logger = logging.getLogger(__name__)


def _label() -> str:
    return RunId(flow_run.parameters["run"], flow_run.parameters["seed"]).label


@flow(name="training", flow_run_name=_label)
def training(run: str, seed: int | None = None) -> None:
    """Trains one run of params.yaml, or goes on where an earlier attempt was interrupted; registers what it learned.

    Data, index and warm start are brought up to date first, as `dvc repro` would. At the end the run's page is made; a
    viewer that fails fails nothing. A seed takes the place of the run's own; its outputs get folders of their own.
    """
    settings, meant = params.load(), RunId(run, seed)
    settings.run(meant)
    for stage in STARTS_FROM:
        reproduce(stage)
    run_command("train", *meant.words)
    run_command("register", *meant.words)
    registered = json.loads(settings.places.version(meant).read_text())["version"]
    _show_training(settings.places.training(meant))
    with expendable("the training has no new page of its trajectories"):
        run_command("view", *meant.words)
    emit_event(REGISTERED, {"prefect.resource.id": f"{MODEL}.{meant.label}"}, payload={"model": registered})


def _show_training(folder: Path) -> None:
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
    return [{name: line.get(name) for name in COLUMNS} for line in read_curve(folder / "metrics.jsonl")]


class Drifted(RuntimeError):
    """A model does not answer as it did, beyond chance."""


def _title() -> str:
    return f"evaluation of {', '.join(flow_run.parameters['models'] or ['the champion'])}"


@flow(name="evaluation", flow_run_name=_title)
def evaluation(models: list[str] | None = None, dataset: str | None = None) -> None:
    """Evaluates registered models on the prepared data, and has the gate decide about those that are not the champion.

    All data sets are asked in one evaluation; scores and drift are told apart by data set. Then a challenger's page is
    made anew, with test questions before and after training side by side; where that fails the evaluation stands.

    Args:
        models: references such as `models:/agent_r1/3`, or labels of trainings such as `ppo-seed3`; the champion for
            None.
        dataset: the one whose questions are asked, in place of all.
    """
    settings = params.load()
    prepared = settings.prepare.datasets
    if dataset is not None and dataset not in prepared:
        raise ValueError(f"no data set is prepared called {dataset!r}{nearest(dataset, prepared)}")
    versions = [version_of(model, settings) for model in models or [THE_CHAMPION]]
    drifts = [found for version in versions if (found := _evaluated(version, dataset, settings))]
    beyond = [explain(found, SHOWN) for found in drifts if found.beyond]
    if beyond:
        raise Drifted("\n".join(beyond))
    challengers = [version for version in versions if not version.is_champion]
    _decide(challengers)
    _show_pages([version for version in challengers if in_training(version)])


def _evaluated(version: Version, dataset: str | None, settings: Params) -> Drift | None:
    """Evaluates a version; what changed since the time before, None where there is no earlier evaluation to tell."""
    folder = measure(version, dataset, settings, lambda arguments: run_command("evaluate", *arguments))
    before, current = previous(folder), read(folder)
    if current.aborted:
        logger.warning("%s: no drift is looked for: %s", version.reference, current.aborted)
        return None
    if before is None:
        logger.info("%s: there is no earlier evaluation that was measured alike", version.reference)
        return None
    questions = read_rows(settings.places.questions, Question)
    found = drift(current, before, questions, settings.evaluate)
    (logger.warning if found.changed else logger.info)("%s", explain(found, SHOWN))
    _log_drift(found, folder)
    return found


def _log_drift(found: Drift, folder: Path) -> None:
    """To the MLflow run of the evaluation: how many questions changed, and which."""
    run = tracking.run_of(folder)
    if run is None:
        raise ValueError(f"MLflow no longer has the run of {folder}, which was there a moment ago; evaluate it again")
    run.final({"changed_questions": len(found.changed)})
    run.text(f"{explain(found)}\n", "drift.txt")


def _decide(challengers: Sequence[Version]) -> None:
    """Has the gate decide about each, against the champion of that moment."""
    if challengers and registry.champion() is None:
        crown = f"`python -m flows promote {challengers[0].reference} --first`"
        logger.warning("there is no champion to compare with; the first becomes one only by %s", crown)
        return
    for challenger in challengers:
        promote(challenger.reference)


def _show_pages(challengers: Sequence[Version]) -> None:
    """Makes the pages of their trainings; what answered before training is evaluated first, where it was not yet."""
    if challengers:
        with expendable("no page shows test questions before and after training"):
            reproduce(f"baseline@{BASE_TOOL_CALL}")
    for made in (challenger.descriptor for challenger in challengers):
        with expendable(f"{made.label} has no new page of its trajectories"):
            run_command("view", *RunId.parse(made.label, made.sweep).words)
