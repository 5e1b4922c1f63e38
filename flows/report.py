"""The report stage: `agent-r1 report`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from agent_r1 import params, tracking
from agent_r1.evaluation.comparison import Evaluation, read_evaluation
from agent_r1.evaluation.runs_report import render, write_curves, write_scores
from agent_r1.evaluation.scores import headline, score
from agent_r1.evaluation.sweep import SweptAgents, render_sweep
from agent_r1.evaluation.transcript import plain_text
from agent_r1.files import load_pretrained, read_metrics
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.records import Question
from agent_r1.tables import read_rows
from agent_r1.tracking.store import comparison

BESIDE = "report_beside"  # the folder of a report with further evaluations

logger = logging.getLogger(__name__)


def report(sweep: str = "", beside: str = "") -> None:
    """Compares runs and baselines: on one page, which goes to each of their MLflow runs, and in small files for git.

    Compares `repro_runs` and `repro_baselines`, or every run of a sweep with every seed. Their MLflow runs get new
    scores, because `evaluate.bootstrap_samples` may have changed. `beside` lists further evaluations, separated by
    commas; such a page goes into a folder of its own, which no stage writes.
    """
    settings = params.load()
    places, questions = settings.places, read_rows(settings.places.questions, Question)
    if beside:
        if sweep:
            raise ValueError("--beside adds to the report of repro_runs; leave out --sweep")
        _report_runs(settings, questions, places.report().with_name(BESIDE), beside.split(","))
        return
    evaluations = (
        _report_sweep(settings, questions, sweep) if sweep else _report_runs(settings, questions, places.report())
    )
    for folder, evaluation in evaluations.items():
        if run := tracking.run_of(folder):
            run.final(headline(score(evaluation.predictions, questions, settings.evaluate)))
            for path in sorted(settings.places.report(sweep).iterdir()):
                run.artifact(path, "report")
    logger.info("the report is %s/report.md; `make ui` shows the runs side by side:", settings.places.report(sweep))
    logger.info("%s", comparison())


def _report_runs(
    settings: Params, questions: list[Question], into: Path, beside: Sequence[str] = ()
) -> dict[Path, Evaluation]:
    """Writes the report of the main graph; returns the evaluations in it by their folders."""
    places = settings.places
    names = dict.fromkeys([*settings.repro_runs, *settings.repro_baselines, *beside])
    folders = {name: places.evaluation(name) for name in names}
    for name in beside:
        if not (folders[name] / "hashes.json").exists():
            raise FileNotFoundError(f"there is no evaluation {name!r} in {folders[name].parent}; evaluate it first")
    evaluations = [read_evaluation(name, folder) for name, folder in folders.items()]
    curves = {run: read_metrics(places.training(RunId(run))) for run in settings.repro_runs}
    decode = plain_text(load_pretrained(AutoTokenizer, places.warm_start))
    scores = render(evaluations, curves, questions, decode, into, settings.evaluate)
    if not beside:
        write_scores(places.scores(), scores)
        write_curves(places.curves(), {run: [curve] for run, curve in curves.items()})
    return dict(zip(folders.values(), evaluations, strict=True))


def _report_sweep(settings: Params, questions: list[Question], sweep: str) -> dict[Path, Evaluation]:
    """Writes the report of a sweep; returns the evaluations in it by their folders."""
    places, swept = settings.places, settings.ablations
    members = {run: [RunId(run, seed, sweep) for seed in swept.seeds_of(run)] for run in swept.runs}
    folders = {each: places.evaluation(each.label, sweep) for ids in members.values() for each in ids}
    baselines = {name: places.evaluation(name, sweep) for name in swept.baselines}
    evaluations = {each: read_evaluation(each.label, folder) for each, folder in folders.items()}
    floors = [read_evaluation(name, folder) for name, folder in baselines.items()]
    curves = {run: [read_metrics(places.training(each)) for each in ids] for run, ids in members.items()}
    by_run = {run: [evaluations[each] for each in ids] for run, ids in members.items()}
    rendered = SweptAgents(runs=by_run, baselines=floors, curves=curves, references=swept.references)
    scores = render_sweep(rendered, questions, places.report(sweep), settings.evaluate)
    write_scores(places.scores(sweep), scores)
    write_curves(places.curves(sweep), curves)
    return dict(zip([*folders.values(), *baselines.values()], [*evaluations.values(), *floors], strict=True))
