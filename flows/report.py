"""The report stage: `agent-r1 report`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from agent_r1 import params, tracking
from agent_r1.evaluation.comparison import Evaluation, read_evaluation
from agent_r1.evaluation.plan import told_apart
from agent_r1.evaluation.plots import Curve, along
from agent_r1.evaluation.runs_report import add_notes, render, write_costs, write_curves, write_scores
from agent_r1.evaluation.scores import headline, score
from agent_r1.evaluation.statistics import Interval
from agent_r1.evaluation.sweep import SweptAgents, render_sweep
from agent_r1.evaluation.transcript import plain_text
from agent_r1.files import load_pretrained, read_metrics
from agent_r1.learn.checkpoint import peek
from agent_r1.params.places import RunId
from agent_r1.params.stages import Budget
from agent_r1.records import Question
from agent_r1.tables import read_rows
from agent_r1.tracking.store import comparison

BESIDE = "report_beside"  # the folder of a report that no stage writes

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
    places = settings.places
    questions = read_rows(places.questions, Question)
    into = places.report(sweep).with_name(BESIDE) if beside or over else places.report(sweep)
    folders = _folders(settings, sweep, beside.split(",") if beside else [])
    evaluations = {name: read_evaluation(name, folder) for name, folder in folders.items()}
    members = _members(settings, sweep)
    curves = {run: [_curve(places.training(member), over) for member in ids] for run, ids in members.items()}
    scores = _render(settings, questions, evaluations, members, curves, into)
    _add_costs(settings, members, folders, scores, into)
    if into.name == BESIDE:
        logger.info("the report is %s/report.md", into)
        return
    write_scores(places.scores(sweep), scores)
    write_curves(places.curves(sweep), curves)
    for name, evaluation in evaluations.items():
        tracked = tracking.run_of(folders[name])
        if tracked:
            tracked.final(headline(score(evaluation.predictions, questions, settings.evaluate)))
            for path in sorted(into.iterdir()):
                tracked.artifact(path, "report")
    logger.info("the report is %s/report.md; `agent-r1 serving --only-mlflow` shows the runs side by side:", into)
    logger.info("%s", comparison())


def _folders(settings: params.Params, sweep: str, further: Sequence[str]) -> dict[str, Path]:
    """The folders of the evaluations in a report, with further ones. FileNotFoundError if one of these is not there."""
    folders = {name: settings.places.evaluation(name, sweep) for name in [*settings.reported(sweep), *further]}
    for name in further:
        if not (folders[name] / "hashes.json").exists():
            raise FileNotFoundError(f"there is no evaluation {name!r} in {folders[name].parent}; evaluate it first")
    return folders


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
    trainings = {member: settings.places.training(member) for ids in members.values() for member in ids}
    records = {member.label: peek(folder / "checkpoint") for member, folder in trainings.items()}
    add_notes(into, [f"{label} {change}" for label, record in records.items() if record for change in record.changes])
    pairs = {run: [(trainings[member], folders[member.label]) for member in ids] for run, ids in members.items()}
    write_costs(into, pairs, scores, settings.evaluate.price_per_device_hour)


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
    ablations = settings.ablations
    [first, *_] = members.values()
    sweep = first[0].sweep
    plan = told_apart(settings, sweep, min(map(len, members.values())), next(iter(evaluations.values())))
    if not sweep:
        decode = plain_text(load_pretrained(AutoTokenizer, settings.places.warm_start))
        single = {run: curve for run, [curve] in curves.items()}
        return render([*evaluations.values()], single, questions, decode, into, settings.evaluate, plan)
    agents = SweptAgents(
        runs={run: [evaluations[member.label] for member in ids] for run, ids in members.items()},
        baselines=[evaluations[name] for name in ablations.baselines],
        curves=curves,
        references=ablations.references,
        equal=ablations.equal,
        plan=plan,
    )
    return render_sweep(agents, questions, into, settings.evaluate)
