"""The smallest difference that a sweep can show, before it is trained."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from agent_r1.evaluation import comparison, plots, runs_report, statistics
from agent_r1.evaluation.statistics import RECIPE_SEEDS
from agent_r1.evaluation.sweep import successes
from agent_r1.files import METRICS, read_metrics
from agent_r1.params import Params
from agent_r1.params.places import SWEEP, RunId

# The variances of docs/ablations/report.md by `python -m benchmarks.foretold`, its questions, samples, minutes by seed.
SHIPPED = (
    "the shipped ablations of Atlas, since no run of this project's sweep is evaluated",
    statistics.Variances(seeds=0.0027, freedom=36, questions=0.050, paired=0.034, noise=0.104, samples=0.0),
    *(400, 1, [3.3]),
)


def plan(settings: Params, seeds: int, questions: int, samples: int) -> str:
    """The half widths to expect of a sweep and of larger ones; 0 seeds, questions or samples are those of settings."""
    where, found, asked, known, minutes = _evidence(settings)
    s, k = seeds or len(settings.ablations.seeds), samples or settings.evaluate.samples
    n = questions or settings.evaluate.questions or asked
    if n < 2:
        raise ValueError("one question does not vary; plan with `agent-r1 plan --questions 100`, for instance")
    if k > known == 1:
        remedy = "evaluate its runs with more, or `agent-r1 plan --samples 1`"
        raise ValueError(f"the evidence ({where}) has one answer to each question, which says nothing of {k}; {remedy}")
    sizes = {f"{s} x {n} x {k}": (s, n, k), "one more seed": (s + 1, n, k), "twice the seeds": (2 * s, n, k)}
    sizes |= {"twice the questions": (s, 2 * n, k)} | ({"twice the samples": (s, n, 2 * k)} if known > 1 else {})
    rows = []
    for name, size in sizes.items():
        halves = [statistics.foretold(found, *size, recipes) for recipes in (1, 2)]
        cells = [comparison.mean_cell(each) if each.low < each.high else f"{each.mean:.3f}" for each in halves]
        rows.append([name, *cells, f"{size[0] * float(np.mean(minutes)):.1f}" if minutes else runs_report.ABSENT])
    parts = [
        "Half widths of 95 % intervals, with the range of 90 in 100 such sweeps. A smaller difference is not told "
        "apart, which does not say that the recipes are equal.",
        comparison.markdown_table(["seeds x questions x samples", "of a score", "of a difference", "minutes"], rows),
        f"The variances are those of {where}. Minutes are of training a run; those of evaluating are not stored.",
        *[f"Fewer than {RECIPE_SEEDS} seeds are fixed policies: intervals over questions alone."] * (s < RECIPE_SEEDS),
        *["With one answer to each question the evidence says nothing of samples."] * (known == 1),
        *["Nothing varies in the evidence: its answers are all right, or all wrong."]
        * (not found.seeds + found.questions + found.noise + found.samples),
    ]
    return "\n\n".join(parts)


def _evidence(settings: Params) -> tuple[str, statistics.Variances, int, int, list[float]]:
    """The evidence of the project's sweep, or `SHIPPED` where none of its runs was evaluated."""
    places, swept = settings.places, settings.ablations
    home = places.evaluation("", SWEEP)
    runs = [RunId(run, seed, SWEEP) for run in swept.runs for seed in swept.seeds_of(run)]
    made = [run for run in runs if (home / run.label / "predictions.parquet").exists()]
    if not made:
        return SHIPPED
    evaluations = [comparison.read_evaluation(run.label, home / run.label) for run in made]
    ways = {comparison.decoding(each.hashes): each.name for each in evaluations}
    if len(ways) > 1:
        unlike = " and ".join(f"{name} ({way})" for way, name in ways.items())
        raise ValueError(f"{unlike} answered differently; evaluate both again under the same configuration")
    hits = successes({each.name: [each] for each in evaluations})
    recipes = [np.concatenate([hits[run.label] for run in of]) for _, of in groupby(made, lambda run: run.run)]
    samples, several = int(evaluations[0].hashes["samples"]), [each for each in recipes if len(each) > 1]
    curves = [read_metrics(folder) for folder in map(places.training, made) if (folder / METRICS).exists()]
    found = statistics.variances(several or recipes, samples)
    return (
        str(home),
        found,
        recipes[0].shape[1],
        samples,
        [float(plots.spent(curve, "seconds")[-1]) / 60 for curve in curves],
    )
