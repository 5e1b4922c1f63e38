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
    places, questions = settings.places, read_rows(settings.places.questions, Question)
    into = places.report(sweep).with_name(BESIDE) if beside or over else places.report(sweep)
    further = beside.split(",") if beside else []
    folders = {name: places.evaluation(name, sweep) for name in [*settings.reported(sweep), *further]}
    for name in further:
        if not (folders[name] / "hashes.json").exists():
            raise FileNotFoundError(f"there is no evaluation {name!r} in {folders[name].parent}; evaluate it first")
    evaluations = {name: read_evaluation(name, folder) for name, folder in folders.items()}
    members = _members(settings, sweep)
    curves: dict[str, list[Curve]]
    curves = {run: [read_metrics(places.training(each)) for each in ids] for run, ids in members.items()}
    if over:
        curves = {run: [along(curve, over) for curve in seeds] for run, seeds in curves.items()}
    scores = _render(settings, questions, evaluations, members, curves, into)
    trained = {run: [(places.training(each), folders[each.label]) for each in ids] for run, ids in members.items()}
    records = {each.label: peek(places.training(each) / "checkpoint") for ids in members.values() for each in ids}
    add_notes(into, [f"{label} {change}" for label, each in records.items() if each for change in each.changes])
    write_costs(into, trained, scores, settings.evaluate.price_per_device_hour)
    if into.name == BESIDE:
        logger.info("the report is %s/report.md", into)
        return
    write_scores(places.scores(sweep), scores)
    write_curves(places.curves(sweep), curves)
    for name, evaluation in evaluations.items():
        if run := tracking.run_of(folders[name]):
            run.final(headline(score(evaluation.predictions, questions, settings.evaluate)))
            for path in sorted(into.iterdir()):
                run.artifact(path, "report")
    logger.info("the report is %s/report.md; `agent-r1 serving --only-mlflow` shows the runs side by side:", into)
    logger.info("%s", comparison())


def _members(settings: params.Params, sweep: str) -> dict[str, list[RunId]]:
    """The trainings of every run in a report."""
    if not sweep:
        return {run: [RunId(run)] for run in settings.repro_runs}
    swept = settings.ablations
    return {run: [RunId(run, seed, sweep) for seed in swept.seeds_of(run)] for run in swept.runs}


def _render(
    settings: params.Params,
    questions: list[Question],
    evaluations: Mapping[str, Evaluation],
    members: Mapping[str, list[RunId]],
    curves: Mapping[str, Sequence[Curve]],
    into: Path,
) -> dict[str, Interval]:
    """Writes a report's page and pictures; returns the success of every agent."""
    swept, [first, *_] = settings.ablations, members.values()
    seeds = min(map(len, members.values()))
    plan = told_apart(settings, first[0].sweep, seeds, next(iter(evaluations.values())))
    if not first[0].sweep:
        decode = plain_text(load_pretrained(AutoTokenizer, settings.places.warm_start))
        alone = {run: curve for run, [curve] in curves.items()}
        return render([*evaluations.values()], alone, questions, decode, into, settings.evaluate, plan)
    agents = SweptAgents(
        runs={run: [evaluations[each.label] for each in ids] for run, ids in members.items()},
        baselines=[evaluations[name] for name in swept.baselines],
        curves=curves,
        references=swept.references,
        equal=swept.equal,
        plan=plan,
    )
    return render_sweep(agents, questions, into, settings.evaluate)
