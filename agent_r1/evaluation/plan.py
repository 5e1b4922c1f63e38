"""The smallest difference that a sweep can show, before it is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from agent_r1.evaluation import comparison, plots, statistics
from agent_r1.evaluation.comparison import Evaluation
from agent_r1.evaluation.runs_report import ABSENT
from agent_r1.evaluation.statistics import RECIPE_SEEDS, Variances
from agent_r1.evaluation.sweep import Agents, successes
from agent_r1.files import METRICS, read_metrics
from agent_r1.params import Params
from agent_r1.params.places import SWEEP, RunId

MOST = 100_000  # seeds or questions


class Evidence(NamedTuple):
    """A sweep that was evaluated, by which another one is planned. Seconds are means, and NaN where none are stored."""

    of: str  # in words
    variances: Variances
    questions: int
    samples: int  # of each question
    training_s: float  # of a run
    answer_s: float  # of a device, for evaluating one sample; a greedy answer beside samples has its share in them


class Size(NamedTuple):
    """The size of a sweep."""

    seeds: int
    questions: int
    samples: int  # of each question


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


def plan(settings: Params, seeds: int, questions: int, samples: int, runs: Agents | None = None) -> str:
    """The half widths to expect of a sweep and of larger ones; 0 seeds, questions or samples are those of settings.

    The evidence is that of other trainers' `runs`, with the evaluations of their seeds, where some are given.
    """
    evidence, known = _planned_from(settings, runs)
    size = Size(seeds or known.seeds, questions or known.questions, samples or known.samples)
    if size.questions < 2:
        raise ValueError("one question does not vary; plan with `agent-r1 plan --questions 100`, for instance")
    if size.samples > evidence.samples == 1:
        problem = f"the evidence ({evidence.of}) has one answer to each question, which says nothing of {size.samples}"
        raise ValueError(f"{problem}; evaluate its runs with more, or `agent-r1 plan --samples 1`")
    sizes = {
        _in_words(size): size,
        "one more seed": size._replace(seeds=size.seeds + 1),
        "twice the seeds": size._replace(seeds=2 * size.seeds),
        "twice the questions": size._replace(questions=2 * size.questions),
    }
    if evidence.samples > 1:
        sizes["twice the samples"] = size._replace(samples=2 * size.samples)
    header = ["seeds x questions x samples", "of a score", "of a difference", "minutes"]
    evaluating = "without evaluating, whose costs are not stored" if isnan(evidence.answer_s) else "with evaluating"
    parts = [
        "Half widths of 95 % intervals, with the range of 90 in 100 such sweeps. A smaller difference is not told "
        "apart, which does not say that the recipes are equal.",
        comparison.markdown_table(header, [[name, *_cells(evidence, row)] for name, row in sizes.items()]),
        f"The variances are those of {evidence.of}{NO_SWEEP * (evidence is SHIPPED)}. Minutes are of all seeds of a "
        f"run, {evaluating}.",
        *[f"Fewer than {RECIPE_SEEDS} seeds are fixed policies: intervals over questions alone."]
        * (size.seeds < RECIPE_SEEDS),
        *["With one answer to each question the evidence says nothing of samples."] * (evidence.samples == 1),
        *(_apart(evidence, runs, size) if runs else ()),
        *["Nothing varies in the evidence: its answers are all right, or all wrong."]
        * (not any(evidence.variances._replace(freedom=0))),
    ]
    return "\n\n".join(parts)


def _planned_from(settings: Params, runs: Agents | None) -> tuple[Evidence, Size]:
    """The evidence, and the size to plan for where none is asked for: that of imported `runs`, or of the settings."""
    if runs:
        evidence = evidence_of(runs, ", ".join(evaluation.name for of in runs.values() for evaluation in of))
        return evidence, Size(max(map(len, runs.values())), evidence.questions, evidence.samples)
    evidence = _evidence(settings)
    samples = settings.evaluate.samples if evidence.samples > 1 else 1
    return evidence, Size(len(settings.ablations.seeds), settings.evaluate.questions or evidence.questions, samples)


def _in_words(size: Size) -> str:
    return " x ".join(map(str, size))


def _apart(evidence: Evidence, runs: Agents, size: Size) -> Iterator[str]:
    """For each run but the first, the seeds and the questions from which its difference would be told apart."""
    means = {name: float(hits.mean()) for name, hits in successes(runs).items()}
    first, *others = means
    for name in others:
        gap = means[name] - means[first]
        by_seeds = _least(gap, lambda more: size._replace(seeds=more), evidence, size.seeds)
        by_questions = _least(gap, lambda more: size._replace(questions=more), evidence, size.questions)
        needed = f"{by_seeds} seeds, or with {by_questions} questions"
        yield f"`{name}` less `{first}`: {gap:+.3f}, told apart with {needed}."


def _least(gap: float, size: Callable[[int], Size], evidence: Evidence, now: int) -> str:
    """The least number, from `now` on, with which a difference's half width is below the gap, within a tenth."""
    number = now
    while number < MOST:
        if statistics.foretold(evidence.variances, *size(number), 2).mean < abs(gap):
            return f"{number}{' (as many as there are)' * (number == now)}"
        number += max(1, number // 10)
    return f"more than {MOST:,}"


def told_apart(settings: Params, sweep: str, seeds: int, answered: Evaluation, runs: Agents | None = None) -> str:
    """A report's paragraph on the differences that its seeds, questions and samples tell apart, as `plan` has them.

    It is by the variances of a sweep's own `runs` where they are known, else by those of `SHIPPED`.
    """
    try:
        evidence = evidence_of(runs, sweep) if runs else _evidence(settings) if sweep else SHIPPED
    except ValueError:  # runs of the sweep that were not measured alike
        evidence = SHIPPED
    size = Size(seeds, max(2, len(answered.success)), int(answered.hashes["samples"]))
    score, difference, _ = _cells(evidence, size)
    return (
        f"Planned for {_in_words(size)} seeds, questions and samples: 95 % intervals reach {score} to each "
        f"side of a score, and {difference} of a difference. A smaller difference is not told apart. The variances are "
        f"those of {evidence.of}; `agent-r1 plan` has them of larger ones."
    )


def _cells(evidence: Evidence, size: Size) -> list[str]:
    """The half widths of a score and of a difference, with ranges where seeds vary, and the minutes."""
    halves = [statistics.foretold(evidence.variances, *size, recipes) for recipes in (1, 2)]
    answering_s = size.questions * size.samples * float(np.nan_to_num(evidence.answer_s))
    minutes = size.seeds * (evidence.training_s + answering_s) / 60
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
    evaluations = {
        name: [comparison.read_evaluation(run.label, home / run.label) for run in group]
        for name, group in groupby(runs, lambda run: run.run)
    }
    evidence = evidence_of(evaluations, str(home))
    answers = evidence.questions * evidence.samples
    return evidence._replace(
        training_s=_mean_s(map(settings.places.training, runs), lambda curve: float(plots.spent(curve, "seconds")[-1])),
        answer_s=_mean_s((home / run.label for run in runs), lambda curve: curve[-1]["cost/evaluation_device_s"])
        / answers,
    )


def evidence_of(runs: Agents, of: str) -> Evidence:
    """The evidence of runs with the evaluations of their seeds; `of` says in words whose. Raises as `successes`."""
    evaluations = [*chain.from_iterable(runs.values())]
    _require_one_decoding(evaluations)
    recipes = [hits for hits in successes(runs).values() if len(hits) > 1]
    if len(recipes) < 2:
        raise ValueError(f"{of}: two runs with two seeds each say how they vary, and fewer were named; name more")
    samples = int(evaluations[0].hashes["samples"])
    variances = statistics.variances(recipes, samples)
    return Evidence(of, variances, recipes[0].shape[1], samples, training_s=nan, answer_s=nan)


def _require_one_decoding(evaluations: Sequence[Evaluation]) -> None:
    name_of = {comparison.decoding(evaluation.hashes): evaluation.name for evaluation in evaluations}
    if len(name_of) > 1:
        names = " and ".join(f"{name} ({decoding})" for decoding, name in name_of.items())
        raise ValueError(f"{names} answered differently; evaluate both again under the same configuration")


def _mean_s(folders: Iterable[Path], seconds: Callable[[plots.Curve], float]) -> float:
    """The mean of the `seconds` of metrics; NaN where no folder has any."""
    curves = [read_metrics(folder) for folder in folders if (folder / METRICS).exists()]
    return fmean(map(seconds, curves)) if curves else nan
