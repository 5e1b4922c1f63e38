"""The report of a sweep: every run with every seed, one page. S = seeds, N = questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent_r1.evaluation.comparison import Evaluation, difference_cell, markdown_table, mean_cell, warning
from agent_r1.evaluation.plots import Curve, final_scores, seed_curves
from agent_r1.evaluation.report import CURVES_PNG, FINAL_PNG, differences_table, write_report
from agent_r1.evaluation.statistics import Interval, difference_over_seeds, interval_over_seeds
from agent_r1.params import EvaluateParams
from agent_r1.records import Question

AT_THE_END = 3  # iterations

Agents = Mapping[str, Sequence[Evaluation]]  # by run or baseline, an evaluation per seed
Hits = Mapping[str, NDArray[np.float64]]  # by run or baseline, exact match [S, N] of every seed and question


def render(
    runs: Agents,
    baselines: Sequence[Evaluation],
    curves: Mapping[str, Sequence[Curve]],
    questions: Sequence[Question],
    folder: Path,
    params: EvaluateParams,
) -> None:
    """Writes report.md, learning_curves.png, final_scores.png and metrics.json into `folder`.

    The first run and the first baseline are what the others are compared with.

    Raises:
        ValueError: the agents did not answer the same questions.
    """
    agents = {**runs, **{baseline.name: [baseline] for baseline in baselines}}
    hits, draws = exact_matches(agents), (params.bootstrap_samples, params.seed)
    found = {name: interval_over_seeds(values, *draws) for name, values in hits.items()}
    of_seeds = {name: hits[name].mean(axis=1).tolist() for name in runs}
    reference, base = next(iter(runs)), baselines[0].name
    seeds, asked = hits[reference].shape

    def difference(name: str, other: str) -> str:
        return difference_cell(difference_over_seeds(hits[name], hits[other], *draws)) if name != other else ""

    final_scores(folder / FINAL_PNG, found, list(runs), of_seeds)
    title = "Exact match of the sampled answers, by iteration"
    seed_curves(folder / CURVES_PNG, curves, reference, "rollout/em", title)
    parts = [
        "# Ablations",
        f"{len(runs)} runs with {seeds} seeds each, {asked} test questions, greedy decoding. Brackets are 95 % "
        "bootstrap intervals over questions and seeds; of a baseline, which has one seed, over questions.",
        *warning([evaluation for evaluations in agents.values() for evaluation in evaluations]),
        f"![Exact match on the test questions, per agent and seed]({FINAL_PNG})",
        "## Exact match",
        _scores(hits, found, _by_hops(next(iter(agents.values()))[0], questions)),
        "## Differences on the same questions",
        "The row's agent less the column's. **Bold** where the interval leaves out 0; it is over questions and seeds.",
        differences_table(list(hits), [reference, base], difference),
        "## Training",
        f"Sampled exact match is of the training rollouts, over the last {AT_THE_END} iterations and all seeds. An "
        "alarm is the collapse monitor's; the iteration is that of the first one.",
        _training(curves),
        f"![Exact match per iteration: mean and range of the seeds, dashed: {reference}]({CURVES_PNG})",
    ]
    write_report(folder, parts, {name: each.mean for name, each in found.items()})


def exact_matches(agents: Agents) -> dict[str, NDArray[np.float64]]:
    """By agent, exact match [S, N] of every seed; the questions are in the same order everywhere.

    Raises:
        ValueError: two evaluations are of different questions.
    """
    evaluations = [(name, evaluation) for name, seeds in agents.items() for evaluation in seeds]
    first, asked = evaluations[0][0], evaluations[0][1].asked
    for name, evaluation in evaluations:
        if evaluation.asked != asked:
            raise ValueError(
                f"{name} and {first} answered different questions; evaluate both again under the same configuration"
            )
    return {
        name: np.array([[em for _, em in sorted(each.exact_match.items())] for each in seeds], dtype=np.float64)
        for name, seeds in agents.items()
    }


def _by_hops(evaluation: Evaluation, questions: Sequence[Question]) -> dict[str, NDArray[np.bool_]]:
    """By number of hops, which questions [N] have it, in the order of `exact_matches`."""
    hops_of = {question.question_id: question.hops for question in questions}
    hops = np.array([hops_of[question_id] for question_id in sorted(evaluation.exact_match)])
    return {f"{count} hop{'s' if count > 1 else ''}": hops == count for count in sorted(set(hops.tolist()))}


def _scores(hits: Hits, found: Mapping[str, Interval], hops: Mapping[str, NDArray[np.bool_]]) -> str:
    rows = []
    for name, values in hits.items():
        seeds = " ".join(f"{mean:.3f}" for mean in values.mean(axis=1))
        strata = [f"{values[:, chosen].mean():.3f}" for chosen in hops.values()]
        rows.append([f"`{name}`", mean_cell(found[name]), seeds, *strata])
    return markdown_table(["agent", "all", "single seeds", *hops], rows)


def _training(curves: Mapping[str, Sequence[Curve]]) -> str:
    rows = []
    for run, seeds in curves.items():
        alarmed = [[metrics["iteration"] for metrics in curve if metrics["monitor/alarms"]] for curve in seeds]
        firsts = [str(int(iterations[0])) if iterations else "none" for iterations in alarmed]
        sampled = np.mean([metrics["rollout/em"] for curve in seeds for metrics in curve[-AT_THE_END:]])
        minutes = np.mean([_seconds(curve) for curve in seeds]) / 60
        rows.append([f"`{run}`", str(len(seeds[0])), f"{sampled:.3f}", ", ".join(firsts), f"{minutes:.1f}"])
    header = ["run", "iterations", "sampled exact match", "first alarm, by seed", "minutes per seed"]
    return markdown_table(header, rows)


def _seconds(curve: Curve) -> float:
    """The sum of `time/*_s`; no other metric is in seconds."""
    return sum(value for metrics in curve for name, value in metrics.items() if fnmatch(name, "time/*_s"))
