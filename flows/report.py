"""The report stage: `python -m flows report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoTokenizer

from agent_r1 import params, tracking
from agent_r1.evaluation.comparison import read_curve, read_evaluation
from agent_r1.evaluation.report import render, render_sweep
from agent_r1.evaluation.transcript import plain_text
from agent_r1.files import load_pretrained
from agent_r1.params import SWEEP, Params, RunId
from agent_r1.records import Question
from agent_r1.tables import read_rows
from flows.stage import run_stage


def report(sweep: str = "") -> None:
    """Compares runs and baselines on one page, and adds the page to each of their MLflow runs.

    They are those of `repro_runs` and `repro_baselines`, or every run of a sweep with every seed.
    """
    settings = params.load()
    folders = _report_sweep(settings, sweep) if sweep else _report_runs(settings)
    for folder in folders:
        if run := tracking.run_of(folder):
            for path in sorted(settings.places.report(sweep).iterdir()):
                run.artifact(path, "report")


def _report_runs(settings: Params) -> list[Path]:
    """Writes the report of the main graph; returns the folders of the evaluations in it."""
    places = settings.places
    folders = {name: places.evaluation(name) for name in [*settings.repro_runs, *settings.repro_baselines]}
    render(
        [read_evaluation(name, folder) for name, folder in folders.items()],
        {run: read_curve(places.training(RunId(run)) / "metrics.jsonl") for run in settings.repro_runs},
        read_rows(places.questions, Question),
        plain_text(load_pretrained(AutoTokenizer, places.warm_start)),
        places.report(),
        settings.evaluate,
    )
    return list(folders.values())


def _report_sweep(settings: Params, sweep: str) -> list[Path]:
    """Writes the report of a sweep; returns the folders of the evaluations in it."""
    places, swept = settings.places, settings.ablations
    members = {run: [RunId(run, seed, sweep) for seed in swept.seeds_of(run)] for run in swept.runs}
    folders = {each: places.evaluation(each.label, sweep) for ids in members.values() for each in ids}
    baselines = {name: places.evaluation(name, sweep) for name in swept.baselines}
    render_sweep(
        {run: [read_evaluation(each.label, folders[each]) for each in ids] for run, ids in members.items()},
        [read_evaluation(name, folder) for name, folder in baselines.items()],
        {run: [read_curve(places.training(each) / "metrics.jsonl") for each in ids] for run, ids in members.items()},
        read_rows(places.questions, Question),
        places.report(sweep),
        settings.evaluate,
    )
    return [*folders.values(), *baselines.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares the runs that were trained and evaluated.")
    of_a_sweep = "those of this sweep of params.yaml, with all their seeds"
    parser.add_argument("--sweep", choices=[SWEEP], default="", help=of_a_sweep)
    run_stage(report, sweep=parser.parse_args().sweep)
