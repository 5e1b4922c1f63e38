"""Flows that prefect.yaml deploys: a training, and the evaluation of registered models."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any
from uuid import UUID

from prefect import flow
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import State, StateType
from prefect.deployments import run_deployment
from prefect.events import emit_event
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Failed
from pydantic import WithJsonSchema

from agent_r1 import params, tracking
from agent_r1.evaluation.comparison import interval_of, markdown_table, mean_cell, read_scores
from agent_r1.evaluation.scores import BASE_TOOL_CALL, BOUNDS, in_words
from agent_r1.evaluation.verdicts import Drift, drift, explain
from agent_r1.files import read_metrics, write_text
from agent_r1.harmless import in_markdown
from agent_r1.params import Params
from agent_r1.params.places import MODEL, SCHEME, Places, RunId
from agent_r1.params.sections import Natural, flatten, nearest
from agent_r1.params.train import TrainParams
from agent_r1.records import Question, words_of
from agent_r1.tables import read_rows
from agent_r1.tracking import registry
from flows.operation.promote import measure, previous, promote, read, run_page
from flows.pipeline import artifact_key, expendable, reproduce, run_command
from flows.policies import in_training, version_of
from flows.terminal import speak

STARTS_FROM = ("prepare", "index", "warm_start")  # the stages of dvc.yaml, in their order
REGISTERED = "agent_r1.policy.registered"  # the event that prefect.yaml waits for
COLUMNS = ("iteration", "rollout/success", "reward/total", "rollout/valid_call_share", "rollout/tool_calls")
SHOWN = 20  # changed questions that a message names


logger = logging.getLogger(__name__)


TRAIN = "https://train"  # no address: the parts of its JSON schema refer to each other by it


def _known(part: dict[str, Any]) -> dict[str, Any]:
    """A part of the schema of `train` for overrides: nothing is required, and neither seed nor code is known."""
    return {name: value for name, value in part.items() if name not in ("default", "required", "seed", "function")}


_SCHEMA = TrainParams.model_json_schema(ref_template=TRAIN + "#/$defs/{model}")
_OVERRIDES = {"$id": TRAIN, **json.loads(json.dumps(_SCHEMA), object_hook=_known)}
# Prefect's page shows an editor for conditions. For properties it shows 70 fields, and sends false for every box.
_CHECKED = {"if": {"type": "object"}, "then": _OVERRIDES, "else": {"type": "null"}}
Overrides = Annotated[dict[str, Any] | None, WithJsonSchema(_CHECKED)]


def _run_name() -> str:
    """What a training is called: `grpo-seed3, 16 iterations`."""
    parameters = flow_run.parameters
    changes = flatten(parameters.get("overrides") or {})
    label = RunId(parameters["run"], parameters.get("seed")).label
    return shorten(", ".join([label, *(f"{value} {name}" for name, value in changes.items())]), 100)


@flow(name="training", flow_run_name=_run_name)
def training(run: str, seed: Natural | None = None, overrides: Overrides = None) -> State[None]:
    """Trains one run of params.yaml, or goes on with an interrupted attempt, and registers the policy.

    Brings data, index and warm start up to date first, as `dvc repro` would. Makes the run's page at the end; if that
    fails, the training stands.

    Args:
        run: a name under `runs` of params.yaml.
        seed: in place of the run's own; its outputs have folders of their own.
        overrides: of `train`, for this one training, such as {"iterations": 5}; it is a run of its own, `ppo-0a1b2c3d`.
    """
    speak()
    settings = params.load()
    run_id = RunId(run, seed)
    try:
        settings.run(run_id)
        run_id = run_id if overrides is None else settings.varied(run_id, overrides)
    except ValueError as fault:  # beyond the form's schema: values that do not go together, or change nothing
        return Failed(name="Invalid", message=str(fault))
    if overrides is not None:
        write_text(settings.places.variant(run_id), json.dumps(overrides))
    for stage in STARTS_FROM:
        reproduce(stage)
    run_command("train", run_id.word)
    run_command("register", run_id.word)
    registered = json.loads(settings.places.version(run_id).read_text())["version"]
    summary = show_training(settings.places.training(run_id), settings.places)
    with expendable("the training has no new page of its trajectories"):
        run_command("view", run_id.word)
    emit_event(REGISTERED, {"prefect.resource.id": f"{MODEL}.{run_id.label}"}, payload={"model": registered})
    return Completed(message=f"{summary}; registered as {registered}")


def show_training(folder: Path, places: Places) -> str:
    """Shows the scores by iteration, and a link to the run in MLflow; returns the first and last score in words."""
    name = folder.name
    rows = scores(folder)
    create_table_artifact(rows, key=artifact_key("scores", name), description=f"Scores of {name}, by iteration")
    page = run_page((folder / "mlflow_run_id").read_text())
    key = artifact_key("mlflow", name)
    about = f"The run of {name}: curves, parameters, viewer"
    create_link_artifact(page, link_text=f"{name} in MLflow", key=key, description=about)
    word = words_of(read_rows(places.questions, Question)).right
    first, last = (rows[place]["rollout/success"] for place in (0, -1))
    return f"{word} {first:.3f} -> {last:.3f} while it trained, {len(rows)} iteration{'s' if len(rows) > 1 else ''}"


def scores(folder: Path) -> list[dict[str, float | None]]:
    """Reads a run's table of scores: a row per finished iteration."""
    return [{name: line.get(name) for name in COLUMNS} for line in read_metrics(folder)]


class Drifted(RuntimeError):
    """A model does not answer as it did, beyond chance."""


def _title() -> str:
    return f"evaluation of {', '.join(flow_run.parameters['models'] or ['the champion'])}"


@flow(name="evaluation", flow_run_name=_title)
def evaluation(models: list[str] | None = None, dataset: str | None = None) -> State[None]:
    """Evaluates registered models on the prepared data, and has the gate decide about each challenger.

    One evaluation asks all data sets; scores and drift are told apart by data set. Then it makes a challenger's page
    anew, with test questions before and after training side by side; if that fails, the evaluation stands.

    Args:
        models: references such as `models:/agent_r1/3`, or labels of trainings such as `ppo-seed3`; the champion for
            None.
        dataset: the one whose questions are asked, in place of all.
    """
    speak()
    if cancelled := expired():
        return cancelled
    settings = params.load()
    prepared = settings.prepare.datasets
    if dataset is not None and dataset not in prepared:
        raise ValueError(f"no data set is prepared called {dataset!r}{nearest(dataset, prepared)}")
    versions = _versions(models, settings)
    summaries, drifts = zip(*(_evaluated(version, dataset, settings) for version in versions), strict=True)
    beyond = [explain(change, SHOWN) for change in drifts if change and change.beyond]
    if beyond:
        raise Drifted("\n".join(beyond))
    challengers = [version for version in versions if not version.is_champion]
    verdicts = [*_decide(challengers, asking=bool(settings.promote.yes_within_h))]
    _show_pages([version for version in challengers if in_training(version)])
    return Completed(message="; ".join([*summaries, *verdicts]))


def _versions(models: Sequence[str] | None, settings: Params) -> list[registry.Version]:
    """The registered versions of those names; for None the champion."""
    champion = f"{SCHEME}{settings.places.model}@{registry.CHAMPION}"
    return [version_of(model, settings) for model in models or [champion]]


def expired() -> State[None] | None:
    """Ends a run of a paused schedule as cancelled; else cancels the other due runs, for which this one stands."""
    if flow_run.id is None or deployment.id is None:
        return None
    with get_client(sync_client=True) as client:
        this_run = client.read_flow_run(UUID(flow_run.id))
        if not this_run.auto_scheduled:
            return None
        if not any(schedule.active for schedule in client.read_deployment(deployment.id).schedules):
            return Cancelled(message="its schedule was paused while it waited")
        waiting = {
            "deployment_id": {"any_": [deployment.id]},
            "state": {"type": {"any_": [StateType.SCHEDULED]}},
            "next_scheduled_start_time": {"before_": datetime.now(UTC)},
        }
        due = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(waiting))
        for run in (run for run in due if run.auto_scheduled):
            client.set_flow_run_state(run.id, Cancelled(message=f"{this_run.name}, which waited too, stands for it"))
    return None


def _evaluated(version: registry.Version, dataset: str | None, settings: Params) -> tuple[str, Drift | None]:
    """Evaluates and shows a version; returns its score in words, and its drift if there is an earlier evaluation."""
    folder = measure(version, dataset, settings, lambda arguments: run_command("evaluate", *arguments))
    change = _drifted(version, folder, settings)
    summary = show_evaluation(version, folder, settings, change)
    logger.info("%s", summary)
    return summary, change


def show_evaluation(version: registry.Version, folder: Path, settings: Params, change: Drift | None) -> str:
    """Shows a version's scores, and the drift since the previous evaluation; returns the overall score in words."""
    questions = read_rows(settings.places.questions, Question)
    measured = read_scores(folder, questions, settings.evaluate)
    cells = {
        name: mean_cell(interval_of(measured, name)) if f"{name}/low" in measured else f"{mean:.3f}"
        for name, mean in measured.items()
        if not name.endswith(BOUNDS)
    }
    home = folder.parent.name
    page = run_page((folder / "mlflow_run_id").read_text())
    parts = [
        f"{home}, of {version.descriptor.label}. [In MLflow]({page})",
        markdown_table(["", "mean [95 % interval]"], [[in_markdown(name), cell] for name, cell in cells.items()]),
        in_markdown(explain(change, 0)) if change else "There is no earlier evaluation that was measured alike.",
    ]
    changed = f", {len(change.changed)} answers changed" if change and change.changed else ""
    summary = f"{in_words(measured, words_of(questions).right)}{changed}"
    create_markdown_artifact("\n\n".join(parts) + "\n", key=artifact_key("evaluation", home), description=summary)
    return f"{version.name}: {summary}"


def _drifted(version: registry.Version, folder: Path, settings: Params) -> Drift | None:
    """The drift since the previous evaluation, logged to this one's MLflow run; None if there is no previous one."""
    earlier = previous(folder)
    current = read(folder)
    if current.aborted:
        logger.warning("%s: no drift is looked for: %s", version.reference, current.aborted)
        return None
    if earlier is None:
        logger.info("%s: there is no earlier evaluation that was measured alike", version.reference)
        return None
    change = drift(current, earlier, read_rows(settings.places.questions, Question), settings.evaluate)
    (logger.warning if change.changed else logger.info)("%s", explain(change, SHOWN))
    run = tracking.run_of(folder)
    if run is None:
        raise ValueError(f"MLflow no longer has the run of {folder}, which was there a moment ago; evaluate it again")
    run.final({"changed_questions": len(change.changed)})
    run.text(f"{explain(change)}\n", "drift.txt")
    return change


def _decide(challengers: Sequence[registry.Version], *, asking: bool) -> Iterator[str]:
    """Has the gate compare each challenger with the current champion; gives its verdicts in words."""
    if challengers and registry.champion(challengers[0].model) is None:
        reason = registry.no_champion(registry.versions(challengers[0].model))
        logger.warning("%s", reason)
        yield reason
        return
    for challenger in challengers:
        if asking:  # in a run of its own, since Prefect suspends no part of another
            parameters = {"challenger": challenger.reference}
            run_deployment("promote/promote", parameters=parameters, timeout=0, as_subflow=False)
            yield f"{challenger.name} is decided in a run of its own"
            continue
        state = promote(challenger.reference, return_state=True)
        state.result()  # raises the fault of a failed flow
        yield f"{challenger.name} {state.message}"


def _show_pages(challengers: Sequence[registry.Version]) -> None:
    """Makes the pages of their trainings, after the evaluation of the policy before training if it is missing."""
    if challengers:
        with expendable("no page shows test questions before and after training"):
            reproduce(f"baseline@{BASE_TOOL_CALL}")
    for descriptor in (challenger.descriptor for challenger in challengers):
        with expendable(f"{descriptor.label} has no new page of its trajectories"):
            run_command("view", RunId.parse(descriptor.label, descriptor.sweep).word)
