"""The recurring evaluation as a Prefect flow: registered models on all prepared data, held against the time before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from agent_r1 import params, tracking
from agent_r1.evaluation.drift import Drift, drift, explain
from agent_r1.evaluation.predictions import BASE_TOOL_CALL
from agent_r1.params import Params, RunId
from agent_r1.params.sections import nearest
from agent_r1.records import Question
from agent_r1.tables import read_rows
from agent_r1.tracking import registry
from agent_r1.tracking.registry import THE_CHAMPION, Version
from flows.commands import expendable, reproduce, run_command
from flows.operation.history import measure, previous, read
from flows.operation.promote import promote
from flows.policies import in_training, version_of

SHOWN = 20  # changed questions that a message names

logger = logging.getLogger(__name__)


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

    Raises:
        ValueError: there is no such model or data set, or no champion to evaluate.
        StageFailed: an evaluation failed.
        Drifted: a model's exact match is another one than at its previous evaluation, beyond chance.
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
    _show([version for version in challengers if in_training(version)])


def _evaluated(version: Version, dataset: str | None, settings: Params) -> Drift | None:
    """Evaluates a version; what changed since the time before, None where there is no earlier evaluation to tell."""
    folder = measure(version, dataset, settings, lambda arguments: run_command("evaluate", *arguments))
    before = previous(folder)
    if before is None:
        logger.info("%s: there is no earlier evaluation that was measured alike", version.reference)
        return None
    questions = read_rows(settings.places.questions, Question)
    found = drift(read(folder), before, questions, settings.evaluate)
    (logger.warning if found.changed else logger.info)("%s", explain(found, SHOWN))
    _log(found, folder)
    return found


def _log(found: Drift, folder: Path) -> None:
    """To the MLflow run of the evaluation: how many questions changed, and which."""
    run = tracking.resume((folder / "mlflow_run_id").read_text())
    assert run is not None, "it was started a moment ago"
    run.final({"changed_questions": len(found.changed)})
    run.text(f"{explain(found)}\n", "drift.txt")


def _decide(challengers: Sequence[Version]) -> None:
    """Has the gate decide about each, against the champion of that moment."""
    if challengers and registry.champion() is None:
        logger.warning(
            "there is no champion to compare with; the first becomes one only by `python -m flows promote %s --first`",
            challengers[0].reference,
        )
        return
    for challenger in challengers:
        promote(challenger.reference)


def _show(challengers: Sequence[Version]) -> None:
    """Makes the pages of their trainings; what answered before training is evaluated first, where it was not yet."""
    if challengers:
        with expendable("no page shows test questions before and after training"):
            reproduce(f"baseline@{BASE_TOOL_CALL}")
    for made in (challenger.descriptor for challenger in challengers):
        with expendable(f"{made.label} has no new page of its trajectories"):
            run_command("view", *RunId.parse(made.label, made.sweep).words)
