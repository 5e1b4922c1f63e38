"""The report of a sweep: every run with every seed, one page. S = seeds, N = questions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent_r1.evaluation import comparison
from agent_r1.evaluation.comparison import Evaluation, warning
from agent_r1.evaluation.plots import Curve, final_scores, seed_curves
from agent_r1.evaluation.report import CURVES_PNG, FINAL_PNG, METRICS, PAGE
from agent_r1.evaluation.statistics import Interval, difference_over_seeds, interval_over_seeds
from agent_r1.files import write_text
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
    *,
    samples: int,
    seed: int,
) -> None:
    """Writes report.md, learning_curves.png, final_scores.png and metrics.json into `folder`.

    The first run and the first baseline are what the others are compared with. `samples` and `seed` are those of the
    bootstrap.

    Raises:
        ValueError: the agents did not answer the same questions.
    """
    agents = {**runs, **{baseline.name: [baseline] for baseline in baselines}}
    hits = exact_matches(agents)
    found = {name: interval_over_seeds(values, samples, seed) for name, values in hits.items()}
    of_seeds = {name: hits[name].mean(axis=1).tolist() for name in runs}
    reference, base = next(iter(runs)), baselines[0].name
    final_scores(folder / FINAL_PNG, found, list(runs), of_seeds)
    seed_curves(
        folder / CURVES_PNG, curves, reference, "rollout/em", "Exact match of the sampled answers, by iteration"
    )
    page = [
        "# Ablations",
        _summary(runs, hits),
        *warning([evaluation for evaluations in agents.values() for evaluation in evaluations]),
        f"![Exact match on the test questions, per agent and seed]({FINAL_PNG})",
        "## Exact match",
        _scores(hits, found, _by_hops(next(iter(agents.values()))[0], questions)),
        "## Differences on the same questions",
        "The row's agent less the column's. **Bold** where the interval leaves out 0; it is over questions and seeds.",
        _differences(hits, [reference, base], samples, seed),
        "## Training",
        f"Sampled exact match is of the training rollouts, over the last {AT_THE_END} iterations and all seeds. An "
        "alarm is the collapse monitor's; the iteration is that of the first one.",
        _training(curves),
        f"![Exact match per iteration: mean and range of the seeds, dashed: {reference}]({CURVES_PNG})",
    ]
    write_text(folder / PAGE, "\n\n".join(page) + "\n")
    write_text(folder / METRICS, json.dumps({name: round(i.mean, 4) for name, i in found.items()}, indent=2) + "\n")


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
    return {name: np.stack([_in_order(evaluation) for evaluation in seeds]) for name, seeds in agents.items()}


def _in_order(evaluation: Evaluation) -> NDArray[np.float64]:
    ordered = sorted(evaluation.predictions, key=lambda prediction: prediction.question_id)
    return np.array([prediction.em for prediction in ordered], dtype=np.float64)


def _by_hops(evaluation: Evaluation, questions: Sequence[Question]) -> dict[str, NDArray[np.bool_]]:
    """By number of hops, which questions [N] have it, in the order of `exact_matches`."""
    hops_of = {question.question_id: question.hops for question in questions}
    hops = np.array([hops_of[question_id] for question_id in sorted(p.question_id for p in evaluation.predictions)])
    return {f"{count} hop{'s' if count > 1 else ''}": hops == count for count in sorted(set(hops.tolist()))}


def _summary(runs: Agents, hits: Hits) -> str:
    seeds, asked = next(iter(hits.values())).shape
    return (
        f"{len(runs)} runs with {seeds} seeds each, {asked} test questions, greedy decoding. Brackets are 95 % "
        "bootstrap intervals over questions and seeds; of a baseline, which has one seed, over questions."
    )


def _scores(hits: Hits, found: Mapping[str, Interval], hops: Mapping[str, NDArray[np.bool_]]) -> str:
    rows = [
        [
            f"`{name}`",
            comparison.mean(found[name]),
            " ".join(f"{mean:.3f}" for mean in values.mean(axis=1)),
            *(f"{values[:, chosen].mean():.3f}" for chosen in hops.values()),
        ]
        for name, values in hits.items()
    ]
    return comparison.table(["agent", "all", "single seeds", *hops], rows)


def _differences(hits: Hits, others: Sequence[str], samples: int, seed: int) -> str:
    def cell(name: str, other: str) -> str:
        if name == other:
            return ""
        return comparison.difference(difference_over_seeds(hits[name], hits[other], samples, seed))

    rows = [[f"`{name}`", *(cell(name, other) for other in others)] for name in hits]
    return comparison.table(["agent", *(f"less `{other}`" for other in others)], rows)


def _training(curves: Mapping[str, Sequence[Curve]]) -> str:
    rows = []
    for run, seeds in curves.items():
        alarmed = [[row["iteration"] for row in rows_of_seed if row["monitor/alarms"]] for rows_of_seed in seeds]
        firsts = [str(int(iterations[0])) if iterations else "none" for iterations in alarmed]
        sampled = np.mean([row["rollout/em"] for rows_of_seed in seeds for row in rows_of_seed[-AT_THE_END:]])
        minutes = np.mean([_seconds(rows_of_seed) for rows_of_seed in seeds]) / 60
        rows.append([f"`{run}`", str(len(seeds[0])), f"{sampled:.3f}", ", ".join(firsts), f"{minutes:.1f}"])
    return comparison.table(
        ["run", "iterations", "sampled exact match", "first alarm, by seed", "minutes per seed"], rows
    )


def _seconds(curve: Curve) -> float:
    return sum(value for row in curve for name, value in row.items() if name.startswith("time/"))
