"""The report stage: `agent-r1 report`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from agent_r1 import params, tracking
from agent_r1.data.quality import Review
from agent_r1.evaluation.comparison import Evaluation, read_evaluation
from agent_r1.evaluation.plan import told_apart
from agent_r1.evaluation.plots import Curve, along
from agent_r1.evaluation.runs_report import add_notes, render, write_costs, write_curves, write_scores
from agent_r1.evaluation.scores import headline, score
from agent_r1.evaluation.statistics import Interval
from agent_r1.evaluation.sweep import SweptAgents, render_sweep
from agent_r1.evaluation.transcript import plain_text
from agent_r1.files import EVALUATION_HASHES, load_pretrained, read_metrics
from agent_r1.learn.checkpoint import Progress, peek
from agent_r1.params.places import RunId
from agent_r1.params.same_run import NOT_ONE_RUN
from agent_r1.params.stages import Budget
from agent_r1.records import Question
from agent_r1.tables import read_rows
from agent_r1.tracking.store import comparison

BESIDE = "report_beside"  # the folder of a report that no stage writes
CHANGED = f"Settings changed while runs were trained; {NOT_ONE_RUN}"
ANSWERABLE = "What is not in the passages, no search can find"

logger = logging.getLogger(__name__)


def report(sweep: str = "", beside: str = "", over: Budget | None = None) -> None:
    """Compares runs and baselines: on one page, which goes to each of their MLflow runs, and in small files for git.

    Compares `repro_runs` and `repro_baselines`, or every run of a sweep with every seed. Their MLflow runs get new
    scores, because `evaluate.bootstrap_samples` may have changed. `beside` lists further evaluations, separated by
    commas, and curves are drawn `over` a budget; either page goes into a folder of its own, which no stage writes.
    """
    if beside and sweep:
        raise ValueError("--beside adds to the report of repro_runs; leave out --sweep")
    settings = params.load()
    questions = read_rows(settings.places.questions, Question)
    folder = settings.places.report(sweep)
    into = folder.with_name(BESIDE) if beside or over else folder
    folders = _folders(settings, sweep, beside.split(",") if beside else [])
    evaluations = {name: read_evaluation(name, folder) for name, folder in folders.items()}
    members = _members(settings, sweep)
    curves = _curves(settings, members, over)
    scores = _render(settings, questions, evaluations, members, curves, into)
    _add_costs(settings, members, folders, scores, into)
    if settings.search.own_passages:
        add_notes(into, ANSWERABLE, [*Review(settings.places.questions, settings.places.passages).evidence()])
    if into.name == BESIDE:
        logger.info("the report is %s/report.md", into)
        return
    write_scores(settings.places.scores(sweep), scores)
    write_curves(settings.places.curves(sweep), curves)
    for name, evaluation in evaluations.items():
        _log(folders[name], headline(score(evaluation.predictions, questions, settings.evaluate)), into)
    logger.info("the report is %s/report.md; `agent-r1 serving --only-mlflow` shows the runs side by side:", into)
    logger.info("%s", comparison())


def _folders(settings: params.Params, sweep: str, further: Sequence[str]) -> dict[str, Path]:
    """The folders of the evaluations in a report, with further ones. FileNotFoundError if one of these is not there."""
    folders = {name: settings.places.evaluation(name, sweep) for name in [*settings.reported(sweep), *further]}
    for name in further:
        if not (folders[name] / EVALUATION_HASHES).exists():
            raise FileNotFoundError(f"there is no evaluation {name!r} in {folders[name].parent}; evaluate it first")
    return folders


def _log(evaluation: Path, measures: Mapping[str, float], report: Path) -> None:
    """Gives an evaluation's MLflow run its scores and the files of a report, if the store has the run."""
    tracked = tracking.run_of(evaluation)
    if tracked:
        tracked.final(measures)
        tracked.report(report)


def _curves(
    settings: params.Params, members: Mapping[str, list[RunId]], budget: Budget | None
) -> dict[str, list[Curve]]:
    """The curves of every run's trainings, over a budget if there is one."""
    places = settings.places
    return {run: [_curve(places.training(member), budget) for member in ids] for run, ids in members.items()}


def _curve(training: Path, budget: Budget | None) -> Curve:
    curve = read_metrics(training)
    return along(curve, budget) if budget else curve


def _add_costs(
    settings: params.Params,
    members: Mapping[str, list[RunId]],
    folders: Mapping[str, Path],
    scores: Mapping[str, Interval],
    into: Path,
) -> None:
    """Adds notes on trainings whose settings changed, and the table of costs, to a report."""
    records = _records(settings, members)
    add_notes(into, CHANGED, [f"{label} {change}" for label, record in records.items() for change in record.changes])
    machines = dict.fromkeys(name for record in records.values() for _, name in record.machines)
    pairs = {
        run: [(settings.places.training(member), folders[member.label]) for member in ids]
        for run, ids in members.items()
    }
    write_costs(into, pairs, scores, settings.evaluate.price_per_device_hour, [*machines])


def _records(settings: params.Params, members: Mapping[str, list[RunId]]) -> dict[str, Progress]:
    """What the checkpoint of every training tells of it, by the training's label."""
    trainings = {member.label: settings.places.training(member) for ids in members.values() for member in ids}
    records = {label: peek(folder / "checkpoint") for label, folder in trainings.items()}
    return {label: record for label, record in records.items() if record}


def _members(settings: params.Params, sweep: str) -> dict[str, list[RunId]]:
    """The trainings of every run in a report."""
    if not sweep:
        return {run: [RunId(run)] for run in settings.repro_runs}
    ablations = settings.ablations
    return {run: [RunId(run, seed, sweep) for seed in ablations.seeds_of(run)] for run in ablations.runs}


def _render(
    settings: params.Params,
    questions: list[Question],
    evaluations: Mapping[str, Evaluation],
    members: Mapping[str, list[RunId]],
    curves: Mapping[str, Sequence[Curve]],
    into: Path,
) -> dict[str, Interval]:
    """Writes a report's page and pictures; returns the success of every agent."""
    sweep = next(iter(members.values()))[0].sweep
    plan = told_apart(settings, sweep, min(map(len, members.values())), next(iter(evaluations.values())))
    if sweep:
        agents = _swept(settings, evaluations, members, curves, plan)
        return render_sweep(agents, questions, into, settings.evaluate)
    decode = plain_text(load_pretrained(AutoTokenizer, settings.places.warm_start))
    single = {run: curve for run, [curve] in curves.items()}
    return render([*evaluations.values()], single, questions, decode, into, settings.evaluate, plan)


def _swept(
    settings: params.Params,
    evaluations: Mapping[str, Evaluation],
    members: Mapping[str, list[RunId]],
    curves: Mapping[str, Sequence[Curve]],
    plan: str,
) -> SweptAgents:
    ablations = settings.ablations
    return SweptAgents(
        runs={run: [evaluations[member.label] for member in ids] for run, ids in members.items()},
        baselines=[evaluations[name] for name in ablations.baselines],
        curves=curves,
        references=ablations.references,
        equal=ablations.equal,
        plan=plan,
    )
