"""The report stage: `python -m flows.report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from agent_r1 import params, tracking
from agent_r1.evaluation.baselines import BASELINES
from agent_r1.evaluation.report import read_curve, read_evaluation, render
from agent_r1.records import Question
from agent_r1.tables import read_rows
from flows.paths import QUESTIONS, WARM_START, evaluate_dir, report_dir, train_dir


def report() -> None:
    """Compares the runs of `repro_runs` and the baselines on one page, and adds the page to each of their MLflow runs.

    Raises:
        FileNotFoundError: one of them was not trained or not evaluated.
    """
    settings = params.load()
    names = [*settings.repro_runs, *BASELINES]
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
    for name in names:
        _track(evaluate_dir(name) / "mlflow_run_id")


def _track(run_id: Path) -> None:
    """Adds the page and its pictures to a run's artifacts, where this store has the run."""
    run = tracking.resume(run_id.read_text()) if run_id.exists() else None
    if run is not None:
        for path in sorted(report_dir().iterdir()):
            run.artifact(path, "report")


if __name__ == "__main__":
    from flows.stage import run_stage

    run_stage(report)
