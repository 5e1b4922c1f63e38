"""The smallest difference that a sweep can show, before it is trained."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from math import isnan, nan
from statistics import fmean
from typing import NamedTuple

import numpy as np

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
    known = _evidence(settings)
    s = seeds or len(settings.ablations.seeds)
    k = samples or (settings.evaluate.samples if known.samples > 1 else 1)
    n = questions or settings.evaluate.questions or known.questions
    if n < 2:
        raise ValueError("one question does not vary; plan with `agent-r1 plan --questions 100`, for instance")
    if k > known.samples == 1:
        said = f"the evidence ({known.of}) has one answer to each question, which says nothing of {k}"
        raise ValueError(f"{said}; evaluate its runs with more, or `agent-r1 plan --samples 1`")
    sizes = {f"{s} x {n} x {k}": (s, n, k), "one more seed": (s + 1, n, k), "twice the seeds": (2 * s, n, k)}
    sizes["twice the questions"] = (s, 2 * n, k)
    if known.samples > 1:
        sizes["twice the samples"] = (s, n, 2 * k)
    header = ["seeds x questions x samples", "of a score", "of a difference", "minutes"]
    evaluating = "without evaluating, whose costs are not stored" if isnan(known.answer_s) else "with evaluating"
    parts = [
        "Half widths of 95 % intervals, with the range of 90 in 100 such sweeps. A smaller difference is not told "
        "apart, which does not say that the recipes are equal.",
        comparison.markdown_table(header, [[name, *_cells(known, *size)] for name, size in sizes.items()]),
        f"The variances are those of {known.of}{NO_SWEEP * (known is SHIPPED)}. Minutes are of all seeds of a run, "
        f"{evaluating}.",
        *[f"Fewer than {RECIPE_SEEDS} seeds are fixed policies: intervals over questions alone."] * (s < RECIPE_SEEDS),
        *["With one answer to each question the evidence says nothing of samples."] * (known.samples == 1),
        *["Nothing varies in the evidence: its answers are all right, or all wrong."]
        * (not any(known.variances._replace(freedom=0))),
    ]
    return "\n\n".join(parts)


def told_apart(settings: Params, sweep: str, seeds: int, answered: Evaluation) -> str:
    """A report's paragraph on the differences that its seeds, questions and samples tell apart, as `plan` has them.

    It is by the variances of a sweep's own runs where they are known, else by those of `SHIPPED`.
    """
    try:
        known = _evidence(settings) if sweep else SHIPPED
    except ValueError:  # runs of the sweep that were not measured alike
        known = SHIPPED
    size = seeds, max(2, len(answered.success)), int(answered.hashes["samples"])
    score, difference, _ = _cells(known, *size)
    return (
        f"Planned for {' x '.join(map(str, size))} seeds, questions and samples: 95 % intervals reach {score} to each "
        f"side of a score, and {difference} of a difference. A smaller difference is not told apart. The variances are "
        f"those of {known.of}; `agent-r1 plan` has them of larger ones."
    )


def _cells(known: Evidence, seeds: int, questions: int, samples: int) -> list[str]:
    """The half widths of a score and of a difference, with ranges where seeds vary, and the minutes."""
    halves = [statistics.foretold(known.variances, seeds, questions, samples, recipes) for recipes in (1, 2)]
    minutes = seeds * (known.training_s + questions * samples * float(np.nan_to_num(known.answer_s))) / 60
    shown = [comparison.mean_cell(each) if each.low < each.high else f"{each.mean:.3f}" for each in halves]
    return [*shown, ABSENT if isnan(minutes) else f"{minutes:.1f}"]


def _evidence(settings: Params) -> Evidence:
    """The evidence of the project's sweep, or `SHIPPED` until two of its runs are evaluated with two seeds."""
    places, sweep = settings.places, settings.ablations
    home = places.evaluation("", SWEEP)
    runs = [RunId(run, seed, SWEEP) for run in sweep.runs for seed in sweep.seeds_of(run)]
    made = [run for run in runs if (home / run.label / "predictions.parquet").exists()]
    if sum(count > 1 for count in Counter(run.run for run in made).values()) < 2:
        return SHIPPED
    evaluations = [comparison.read_evaluation(run.label, home / run.label) for run in made]
    ways = {comparison.decoding(each.hashes): each.name for each in evaluations}
    if len(ways) > 1:
        unlike = " and ".join(f"{name} ({way})" for way, name in ways.items())
        raise ValueError(f"{unlike} answered differently; evaluate both again under the same configuration")
    hits = successes({each.name: [each] for each in evaluations})
    recipes = [np.concatenate([hits[run.label] for run in of]) for _, of in groupby(made, lambda run: run.run)]
    several = [each for each in recipes if len(each) > 1]
    questions, samples = recipes[0].shape[1], int(evaluations[0].hashes["samples"])
    trained = [read_metrics(folder) for folder in map(places.training, made) if (folder / METRICS).exists()]
    costs = [read_metrics(home / run.label)[-1] for run in made if (home / run.label / METRICS).exists()]
    return Evidence(
        of=str(home),
        variances=statistics.variances(several, samples),
        questions=questions,
        samples=samples,
        training_s=fmean(float(plots.spent(curve, "seconds")[-1]) for curve in trained) if trained else nan,
        answer_s=fmean(each["cost/evaluation_device_s"] for each in costs) / questions / samples if costs else nan,
    )
