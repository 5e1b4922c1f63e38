"""The promotion gate: `agent-r1 promote models:/agent_r1/3`, and the same as a Prefect flow.

A challenger takes the champion's place if it answers the same questions better beyond chance. A refusal is a decision
and no error. Decisions rest on evaluations of registered versions, one folder each; no stage of DVC reads them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.concurrency.sync import concurrency
from prefect.events.filters import EventFilter
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Completed
from rich.markdown import Markdown

from agent_r1 import params, tracking
from agent_r1.evaluation import comparison
from agent_r1.evaluation.verdicts import Decision, decide, decision_table, verdict
from agent_r1.harmless import harmless
from agent_r1.params.places import SCHEME
from agent_r1.tracking import registry
from agent_r1.tracking.store import address, locked
from flows.pipeline import artifact_key, run_command
from flows.policies import version_of
from flows.processes import process_group, server_answers
from flows.terminal import show, speak

PROMOTION = "agent_r1-promotion"  # the limit under which one process at a time moves the champion
Evaluate = Callable[[Sequence[str]], None]  # runs `agent-r1 evaluate` with these arguments to its end

logger = logging.getLogger(__name__)


def measure(version: registry.Version, dataset: str | None, settings: params.Params, evaluate: Evaluate) -> Path:
    """Evaluates a version on one data set or all, into a new folder that is complete or absent.

    One process at a time evaluates a version on a choice of data sets; others wait. The latest `evaluate.history_kept`
    evaluations stay, older ones are removed. `evaluate` raises if the evaluation fails.
    """
    home = settings.places.history / "-".join([version.name, *([dataset] if dataset else [])])
    home.mkdir(parents=True, exist_ok=True)
    chosen = ["--dataset", dataset] if dataset else []
    unfinished = home / ".unfinished"
    with locked(f"{home.name}.lock"):
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        try:
            evaluate([version.reference, *chosen, "--into", str(unfinished)])
            finished = home / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            unfinished.rename(finished)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        for old in comparison.finished_folders(home)[: -settings.evaluate.history_kept]:
            shutil.rmtree(old.rename(unfinished))  # a kill leaves no part of it under its name
    return finished


def read(folder: Path) -> comparison.Evaluation:
    """Reads an evaluation of a version, under a name that is unique among the version's evaluations."""
    return comparison.read_evaluation(f"{folder.parent.name} of {folder.name}", folder)


def previous(folder: Path) -> comparison.Evaluation | None:
    """The latest earlier evaluation of the same policy that is whole and was measured alike."""
    current = read(folder)
    for earlier in reversed(comparison.finished_folders(folder.parent)):
        if earlier.name < folder.name:
            evaluation = read(earlier)
            if comparison.same_setting(current, evaluation) and not evaluation.aborted:
                return evaluation
    return None


@flow(name="promote", flow_run_name="promotion of {challenger}")
def promote(challenger: str) -> State[None]:
    """Makes a challenger the champion if it is better beyond chance; its state and an artifact say why or why not.

    Args:
        challenger: `models:/agent_r1/3`, or the label of a training such as `ppo-seed3`.
    """
    speak()
    settings = params.load()
    page = run_page(version_of(challenger, settings).descriptor.mlflow_run_id)
    hours = settings.promote.yes_within_h
    objection = partial(ask, page=page, hours=hours) if hours else None
    decision = gate(challenger, lambda arguments: run_command("evaluate", *arguments), objection=objection)
    if decision is None:
        return Completed(message=f"{challenger} is the champion already")
    table = decision_table(decision)
    words = verdict(decision)
    text = f"{table}\n[The training of {decision.challenger} in MLflow]({page})\n"
    create_markdown_artifact(text, key=artifact_key("decision", decision.challenger), description=harmless(words))
    logger.info("%s", table.splitlines()[0])
    return Completed(name="Promoted" if decision.promoted else "Refused", message=words)


class Consent(RunInput):
    """The form on the page of a promotion that waits for a person."""

    promote: bool = False


def ask(decision: Decision, page: str, hours: float) -> str:
    """Asks a person whether a better challenger becomes the champion; the reason if it does not, "" if it does.

    Suspends the run, so that nothing is held meanwhile. With the answer its flow begins anew, and so compares with the
    champion of that time. An answer is about one pair: another champion is asked about again.
    """
    success = f"{decision.challenger_success:.3f} against {decision.champion_success:.3f}"
    if decision.greedily:
        success += " (greedily {:.3f} against {:.3f})".format(*decision.greedily)
    pair = f"Is {decision.challenger} to take the place of {decision.champion}?"
    question = f"{pair} Success {success}, {decision.reason}. [Its training]({page}). No answer in {hours:g} h is a no."
    await_heartbeat()
    answer = suspend_flow_run(
        wait_for_input=Consent.with_initial_data(question),
        timeout=int((hours + 1) * 3600),  # where the automation of `agent-r1 deploy` does not end it
        key=artifact_key(decision.challenger, f"against-{decision.champion}"),
    )
    if answer.promote:
        return ""
    objection = "a person said no" if answer.model_fields_set else f"nobody said yes within {hours:g} h"
    return f"{decision.reason}, but {objection}"


def await_heartbeat() -> None:
    """Waits until the server has a recent heartbeat of this run, for two intervals at most: then none is under way.

    After a heartbeat that arrives behind the suspension the server would miss the next, and show the run as crashed.
    """
    interval_s = get_current_settings().flows.heartbeat_frequency
    if interval_s is None:
        return
    heartbeats = {
        "resource": {"id": [f"prefect.flow-run.{flow_run.id}"]},
        "event": {"name": ["prefect.flow-run.heartbeat"]},
    }
    with get_client(sync_client=True) as client:
        for _ in range(2 * interval_s):
            recent = {"occurred": {"since": datetime.now(UTC) - timedelta(seconds=interval_s / 2)}}
            if client.read_events(EventFilter.model_validate(heartbeats | recent), limit=1).events:
                return
            time.sleep(1)


def run_page(run_id: str) -> str:
    """The address of a run's page in MLflow."""
    return f"{address()}/#/runs/{run_id}"


def gate(
    challenger: str, evaluate: Evaluate, *, anyway: bool = False, objection: Callable[[Decision], str] | None = None
) -> Decision | None:
    """Decides about a challenger, acts on the decision, and logs it to the MLflow run of its training.

    Compares the latest evaluations of both on all data sets. An evaluation that is missing, was cut short by the world,
    or was not measured alike is made first. One that is cut short again is refused, unless `anyway` is set. Returns
    None if the challenger is the champion already. A better one is refused too if there is an `objection` to it.
    """
    settings = params.load()
    version = version_of(challenger, settings)
    champion = registry.find(f"{SCHEME}{version.model}@{registry.CHAMPION}")
    if version.number == champion.number:
        logger.info("%s is the champion already", version.reference)
        return None
    challenging, defending = _measured_alike(version, champion, settings, evaluate)
    decision = decide(challenging, defending, settings.promote, settings.evaluate, anyway=anyway)
    reason = objection(decision) if decision.promoted and objection else ""
    if reason:
        decision = dataclasses.replace(decision, promoted=False, reason=reason)
    if decision.promoted:
        _promote(version, expected=champion)
    run = tracking.resume(version.descriptor.mlflow_run_id)
    if run is None:
        logger.warning("the MLflow run of %s is gone: the decision is not logged", version.reference)
        return decision
    folder = f"promotion/{decision.challenger}_against_{decision.champion}"
    run.text(json.dumps(dataclasses.asdict(decision), indent=2) + "\n", f"{folder}/decision.json")
    run.text(decision_table(decision), f"{folder}/decision.md")
    run.tag("promotion", "promoted" if decision.promoted else "refused")
    return decision


def crown(first: str) -> registry.Version:
    """Makes a version the first champion, without a comparison."""
    version = version_of(first, params.load())
    champion = registry.champion(version.model)
    if champion is not None:
        raise ValueError(f"{champion.reference} is the champion; leave out --first to have {version.reference} decided")
    return _promote(version, expected=None)


def _promote(version: registry.Version, *, expected: registry.Version | None) -> registry.Version:
    """Moves the alias; one process at a time of all that use the Prefect server of `PREFECT_API_URL`."""
    with concurrency(PROMOTION) if server_answers() else nullcontext():
        return registry.promote(version, expected=expected)


def _measured_alike(
    challenger: registry.Version, champion: registry.Version, settings: params.Params, evaluate: Evaluate
) -> tuple[comparison.Evaluation, comparison.Evaluation]:
    """The latest whole evaluations of both; makes missing ones, and old ones that were not measured alike."""

    def measured(version: registry.Version) -> comparison.Evaluation:
        logger.info("evaluating %s", version.reference)
        return comparison.read_evaluation(version.name, measure(version, None, settings, evaluate))

    def latest(version: registry.Version) -> comparison.Evaluation | None:
        folder = comparison.latest_folder(version, settings.places)
        evaluation = comparison.read_evaluation(version.name, folder) if folder else None
        return None if evaluation and evaluation.aborted else evaluation

    stored = latest(challenger), latest(champion)
    first = stored[0] or measured(challenger)
    second = stored[1] or measured(champion)
    if comparison.differences_of_setting([first, second]):
        first = measured(challenger) if stored[0] else first
        second = measured(champion) if stored[1] else second
    return first, second


def _run_evaluate(arguments: Sequence[str]) -> None:
    """Runs `agent-r1 evaluate` in a process group of its own, its lines on standard error."""
    command = ["-m", "flows", "evaluate", *arguments]
    with process_group([sys.executable, *command], os.environ, output=sys.stderr) as process:
        if code := process.wait():
            raise ValueError(f"`python {' '.join(command)}` failed with exit code {code}; see its lines above")


def promote_here(challenger: str, *, first: bool = False, anyway: bool = False) -> None:
    """Decides at a terminal, and prints."""
    if first:
        show(f"{crown(challenger).reference} is the champion")
    elif decision := gate(challenger, _run_evaluate, anyway=anyway):
        show(Markdown(decision_table(decision)))
