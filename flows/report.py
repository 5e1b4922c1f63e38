"""The report stage: `python -m flows report`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from agent_r1.project import QUESTIONS, WARM_START, evaluate_dir, label, report_dir, train_dir
from transformers import AutoTokenizer

from agent_r1 import params, tracking
from agent_r1.evaluation import sweep as sweep_report
from agent_r1.evaluation.comparison import read_curve, read_evaluation
from agent_r1.evaluation.predictions import OF_A_SWEEP
from agent_r1.evaluation.report import render
from agent_r1.params import SWEEP, Params
from agent_r1.records import Question
from agent_r1.tables import read_rows


def report(sweep: str | None = None) -> None:
    """Compares runs and baselines on one page, and adds the page to each of their MLflow runs.

    They are those of `repro_runs` and `repro_baselines`, or every run of a sweep with every seed.

    Raises:
        FileNotFoundError: one of them was not trained or not evaluated.
    """
    settings = params.load()
    folders = _report_sweep(settings, sweep) if sweep else _report_runs(settings)
    for folder in folders:
        _track(folder / "mlflow_run_id", report_dir(sweep))


def _report_runs(settings: Params) -> list[Path]:
    """Writes the report of the main graph; returns the folders of the evaluations in it."""
    names = [*settings.repro_runs, *settings.repro_baselines]
    tokenizer = AutoTokenizer.from_pretrained(WARM_START)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    render(
        [read_evaluation(name, evaluate_dir(name)) for name in names],
        {run: read_curve(train_dir(run) / "metrics.jsonl") for run in settings.repro_runs},
        read_rows(QUESTIONS, Question),
        decode,
        report_dir(),
        samples=settings.evaluate.bootstrap_samples,
        seed=settings.evaluate.seed,
    )
    return [evaluate_dir(name) for name in names]


def _report_sweep(settings: Params, name: str) -> list[Path]:
    """Writes the report of a sweep; returns the folders of the evaluations of its members."""
    runs, seeds = settings.ablations.runs, settings.ablations.seeds
    sweep_report.render(
        {run: [read_evaluation(label(run, seed), evaluate_dir(run, seed, name)) for seed in seeds] for run in runs},
        [read_evaluation(baseline, evaluate_dir(baseline)) for baseline in OF_A_SWEEP],
        {run: [read_curve(train_dir(run, seed, name) / "metrics.jsonl") for seed in seeds] for run in runs},
        read_rows(QUESTIONS, Question),
        report_dir(name),
        samples=settings.evaluate.bootstrap_samples,
        seed=settings.evaluate.seed,
    )
    return [evaluate_dir(run, seed, name) for run in runs for seed in seeds]


def _track(run_id: Path, page: Path) -> None:
    """Adds the page and its pictures to a run's artifacts, where this store has the run."""
    run = tracking.resume(run_id.read_text()) if run_id.exists() else None
    if run is not None:
        for path in sorted(page.iterdir()):
            run.artifact(path, "report")


if __name__ == "__main__":
    from flows.stage import run_stage

    parser = argparse.ArgumentParser(description="Compares the runs that were trained and evaluated.")
    parser.add_argument("--sweep", choices=[SWEEP], help="those of this sweep of params.yaml, with all their seeds")
    run_stage(report, sweep=parser.parse_args().sweep)
