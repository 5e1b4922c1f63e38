"""The smallest difference that a sweep can show, before it is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_r1.evaluation import comparison, plots, statistics
from agent_r1.evaluation.comparison import Evaluation
from agent_r1.evaluation.runs_report import ABSENT
from agent_r1.evaluation.statistics import RECIPE_SEEDS, Variances
from agent_r1.evaluation.sweep import successes
from agent_r1.files import METRICS, read_metrics
from agent_r1.params import Params
from agent_r1.params.places import SWEEP, RunId


class Evidence(NamedTuple):
    """A sweep that was evaluated, by which another one is planned. Seconds are means, and NaN where none are stored."""

    of: str  # in words
    variances: Variances
    questions: int
    samples: int  # of each question
    training_s: float  # of a run
    answer_s: float  # of a device, for evaluating one sample; a greedy answer beside samples has its share in them


NO_SWEEP = ", since no two runs of this project's sweep are evaluated with two seeds"
# What `_evidence` finds in the sweep of docs/ablations/report.md.
SHIPPED = Evidence(
    of="the shipped ablations of Atlas",
    variances=Variances(seeds=0.0018, freedom=26, questions=0.079, paired=0.0077, noise=0.0002, samples=0.127),
    questions=400,
    samples=2,
    training_s=225,
    answer_s=60.4 / 800,
)


def plan(settings: Params, seeds: int, questions: int, samples: int) -> str:
    """The half widths to expect of a sweep and of larger ones; 0 seeds, questions or samples are those of settings."""
    evidence = _evidence(settings)
    s = seeds or len(settings.ablations.seeds)
    k = samples or (settings.evaluate.samples if evidence.samples > 1 else 1)
    n = questions or settings.evaluate.questions or evidence.questions
    if n < 2:
        raise ValueError("one question does not vary; plan with `agent-r1 plan --questions 100`, for instance")
    if k > evidence.samples == 1:
        problem = f"the evidence ({evidence.of}) has one answer to each question, which says nothing of {k}"
        raise ValueError(f"{problem}; evaluate its runs with more, or `agent-r1 plan --samples 1`")
    sizes = {f"{s} x {n} x {k}": (s, n, k), "one more seed": (s + 1, n, k), "twice the seeds": (2 * s, n, k)}
    sizes["twice the questions"] = (s, 2 * n, k)
    if evidence.samples > 1:
        sizes["twice the samples"] = (s, n, 2 * k)
    header = ["seeds x questions x samples", "of a score", "of a difference", "minutes"]
    evaluating = "without evaluating, whose costs are not stored" if isnan(evidence.answer_s) else "with evaluating"
    parts = [
        "Half widths of 95 % intervals, with the range of 90 in 100 such sweeps. A smaller difference is not told "
        "apart, which does not say that the recipes are equal.",
        comparison.markdown_table(header, [[name, *_cells(evidence, *size)] for name, size in sizes.items()]),
        f"The variances are those of {evidence.of}{NO_SWEEP * (evidence is SHIPPED)}. Minutes are of all seeds of a "
        f"run, {evaluating}.",
        *[f"Fewer than {RECIPE_SEEDS} seeds are fixed policies: intervals over questions alone."] * (s < RECIPE_SEEDS),
        *["With one answer to each question the evidence says nothing of samples."] * (evidence.samples == 1),
        *["Nothing varies in the evidence: its answers are all right, or all wrong."]
        * (not any(evidence.variances._replace(freedom=0))),
    ]
    return "\n\n".join(parts)


def told_apart(settings: Params, sweep: str, seeds: int, answered: Evaluation) -> str:
    """A report's paragraph on the differences that its seeds, questions and samples tell apart, as `plan` has them.

    It is by the variances of a sweep's own runs where they are known, else by those of `SHIPPED`.
    """
    try:
        evidence = _evidence(settings) if sweep else SHIPPED
    except ValueError:  # runs of the sweep that were not measured alike
        evidence = SHIPPED
    size = seeds, max(2, len(answered.success)), int(answered.hashes["samples"])
    score, difference, _ = _cells(evidence, *size)
    return (
        f"Planned for {' x '.join(map(str, size))} seeds, questions and samples: 95 % intervals reach {score} to each "
        f"side of a score, and {difference} of a difference. A smaller difference is not told apart. The variances are "
        f"those of {evidence.of}; `agent-r1 plan` has them of larger ones."
    )


def _cells(evidence: Evidence, seeds: int, questions: int, samples: int) -> list[str]:
    """The half widths of a score and of a difference, with ranges where seeds vary, and the minutes."""
    halves = [statistics.foretold(evidence.variances, seeds, questions, samples, recipes) for recipes in (1, 2)]
    minutes = seeds * (evidence.training_s + questions * samples * float(np.nan_to_num(evidence.answer_s))) / 60
    cells = [comparison.mean_cell(half) if half.low < half.high else f"{half.mean:.3f}" for half in halves]
    return [*cells, ABSENT if isnan(minutes) else f"{minutes:.1f}"]


def _evidence(settings: Params) -> Evidence:
    """The evidence of the project's sweep, or `SHIPPED` until two of its runs are evaluated with two seeds."""
    home = settings.places.evaluation("", SWEEP)
    sweep = settings.ablations
    runs = [RunId(run, seed, SWEEP) for run in sweep.runs for seed in sweep.seeds_of(run)]
    runs = [run for run in runs if (home / run.label / "predictions.parquet").exists()]
    if sum(count > 1 for count in Counter(run.run for run in runs).values()) < 2:
        return SHIPPED
    evaluations = [comparison.read_evaluation(run.label, home / run.label) for run in runs]
    _require_one_decoding(evaluations)
    recipes = _recipes(runs, evaluations)
    questions = recipes[0].shape[1]
    samples = int(evaluations[0].hashes["samples"])
    return Evidence(
        of=str(home),
        variances=statistics.variances([recipe for recipe in recipes if len(recipe) > 1], samples),
        questions=questions,
        samples=samples,
        training_s=_mean_s(map(settings.places.training, runs), lambda curve: float(plots.spent(curve, "seconds")[-1])),
        answer_s=_mean_s((home / run.label for run in runs), lambda curve: curve[-1]["cost/evaluation_device_s"])
        / questions
        / samples,
    )


def _require_one_decoding(evaluations: Sequence[Evaluation]) -> None:
    name_of = {comparison.decoding(evaluation.hashes): evaluation.name for evaluation in evaluations}
    if len(name_of) > 1:
        names = " and ".join(f"{name} ({decoding})" for decoding, name in name_of.items())
        raise ValueError(f"{names} answered differently; evaluate both again under the same configuration")


def _recipes(runs: Sequence[RunId], evaluations: Sequence[Evaluation]) -> list[NDArray[np.float64]]:
    """Success [S, N] of every run with its seeds."""
    hits = successes({evaluation.name: [evaluation] for evaluation in evaluations})
    groups = groupby(runs, lambda run: run.run)
    return [np.concatenate([hits[run.label] for run in group]) for _, group in groups]


def _mean_s(folders: Iterable[Path], seconds: Callable[[plots.Curve], float]) -> float:
    """The mean of the `seconds` of metrics; NaN where no folder has any."""
    curves = [read_metrics(folder) for folder in folders if (folder / METRICS).exists()]
    return fmean(map(seconds, curves)) if curves else nan
