"""The report of a sweep with all seeds. S = seeds, N = questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent_r1.evaluation import comparison, plots, runs_report, scores
from agent_r1.evaluation.comparison import Evaluation
from agent_r1.evaluation.plots import SAMPLED, VALIDATED, Curve, final_scores, seed_curves
from agent_r1.evaluation.scores import CEILING, FLOOR
from agent_r1.evaluation.statistics import RECIPE_SEEDS, Interval, difference_over_seeds, interval_over_seeds
from agent_r1.params.stages import Budget, EvaluateParams
from agent_r1.records import Question, words_of

AT_THE_END = 3  # iterations
EXPLAINED = "value/explained_return"  # logged if there is a critic
TOLERANCE = 0.05  # share of a budget by which runs may differ that have it alike

Agents = Mapping[str, Sequence[Evaluation]]  # by run or baseline, an evaluation per seed
Hits = Mapping[str, NDArray[np.float64]]  # by run or baseline, success [S, N] of every seed and question
Chosen = Mapping[str, NDArray[np.bool_]]  # by stratum, which questions [N] are in it


@dataclass(frozen=True, kw_only=True, slots=True)
class SweptAgents:
    """Runs with every seed, baselines with one, and the runs that all others are compared with."""

    runs: Agents
    baselines: Sequence[Evaluation]
    curves: Mapping[str, Sequence[Curve]]  # by run, a curve per seed
    plan: str  # the paragraph of `told_apart`
    references: Sequence[str] = ()  # the first run and the first baseline if empty
    equal: Budget = "episodes"  # that runs should have alike

    @property
    def agents(self) -> Agents:
        """The evaluations of all agents by name, runs first."""
        return {**self.runs, **{baseline.name: [baseline] for baseline in self.baselines}}


def render_sweep(
    sweep: SweptAgents, questions: Sequence[Question], folder: Path, params: EvaluateParams
) -> dict[str, Interval]:
    """Writes report.md, learning_curves.png and final_scores.png into `folder`; returns every agent's success.

    The table of differences has a column for every reference, and one for chance if it was evaluated.
    """
    agents, draws = sweep.agents, (params.bootstrap_samples, params.seed)
    hits, word = successes(agents), words_of(questions).right
    found = {name: interval_over_seeds(values, *draws) for name, values in hits.items()}
    of_seeds = {name: hits[name].mean(axis=1).tolist() for name in sweep.runs}
    reference, several = next(iter(sweep.runs)), len(sweep.runs) > 1
    seeds = sorted({len(evaluations) for evaluations in sweep.runs.values()})
    limits = {str(name): found[name].mean for name in (FLOOR, CEILING) if name in found}
    everyone = [evaluation for evaluations in agents.values() for evaluation in evaluations]
    answered = comparison.decoding(everyone[0].hashes)
    final_scores(folder / runs_report.FINAL_PNG, found, list(sweep.runs), of_seeds, (word, answered))
    title = f"{word.capitalize()} of the sampled episodes, by {plots.axis_of(sweep.curves[reference][0])}"
    seed_curves(folder / runs_report.CURVES_PNG, sweep.curves, reference, SAMPLED, title, limits)
    strata = {name: _strata(agents[reference][0], questions, name) for name in runs_report.strata_of(questions)}
    parts = [
        "# Ablations",
        f"{_counted([len(sweep.runs)], 'run')} with {_counted(seeds, 'seed')}{' each' * several}, "
        f"{_counted([hits[reference].shape[1]], 'test question')}, {answered}. Brackets are 95 % intervals: over "
        f"questions and seeds from {RECIPE_SEEDS} seeds on, else of these policies, over questions.",
        sweep.plan,
        *comparison.warning(everyone),
        *comparison.above_chance(found),
        f"![{word.capitalize()} on the test questions, per agent and seed]({runs_report.FINAL_PNG})",
        f"## {word.capitalize()}",
        _scores_by_seed(agents, hits, found, next(iter(strata.values()), {})),
        *runs_report.budgets(sweep.curves, found, word),
        _with_budgets(sweep, _differences(sweep, hits, strata, draws)),
        *_about_training(sweep.curves, reference, word),
    ]
    runs_report.write_page(folder, parts)
    return found


def _with_budgets(sweep: SweptAgents, differences: Sequence[str]) -> str:
    """The runs that differ from the first in the budget that should be equal; everywhere their names say how far."""
    first, *others = sweep.runs
    amounts = {run: plots.taken(seeds, sweep.equal) for run, seeds in sweep.curves.items()}
    shares = {run: amounts[run] / (amounts[first] or 1) - 1 for run in others}
    apart = [run for run in others if not abs(shares[run]) <= TOLERANCE]
    words, named = plots.BUDGETS[sweep.equal][0], ", ".join(f"`{run}`" for run in apart) or "none"
    said = f"Runs should have equal {words}. More than {100 * TOLERANCE:.0f} % from `{first}`: {named}."
    text = "\n\n".join([*[said] * bool(others), *differences])
    for run in apart:
        text = text.replace(f"`{run}`", f"`{run}` ({100 * shares[run]:+.0f} %)")
    return text.replace("+nan %", "not known")


def _differences(sweep: SweptAgents, hits: Hits, strata: Mapping[str, Chosen], draws: tuple[int, int]) -> list[str]:
    """Paragraphs with the differences from every reference, and from the first run by each of the strata."""
    first, base = next(iter(sweep.runs)), sweep.baselines[0].name

    def difference(name: str, other: str, chosen: NDArray[np.bool_] | slice = slice(None)) -> Interval:
        return difference_over_seeds(hits[name][:, chosen], hits[other][:, chosen], *draws)

    compared = dict.fromkeys([*(sweep.references or (first, base)), *([FLOOR] if FLOOR in hits else [])])
    parts = [
        "## Differences on the same questions",
        *runs_report.differences(
            list(hits), list(compared), lambda name, other: difference(name, other) if name != other else None
        ),
    ]
    for name, chosen in strata.items():
        if len(chosen) > 1:
            parts.append(f"## Differences from `{first}` by {runs_report.STRATA.get(name, name)}")
            others = {
                agent: [difference(agent, first, of) for of in chosen.values()] for agent in hits if agent != first
            }
            rows = [[f"`{agent}`", *map(comparison.difference_cell, found)] for agent, found in others.items()]
            parts.append(comparison.markdown_table(["agent", *chosen], rows))
    return parts


def _about_training(curves: Mapping[str, Sequence[Curve]], reference: str, word: str) -> list[str]:
    several, reached = len(curves) > 1, f"the last {AT_THE_END} iterations that had ended when the fastest training"
    at_equal_time = f"At equal time is of {reached} was over. " * several
    dashed = f", dashed: {reference}" * several
    return [
        "## Training",
        f"Sampled {word} is of the training rollouts, over the last {AT_THE_END} iterations and all seeds, and so "
        f"is the share of the observed return that a critic explains. {at_equal_time}On dev is the {word} of the "
        "last validation: what is chosen among runs is chosen by it. An alarm is the collapse monitor's; the "
        "iteration is that of the first one.",
        _training(curves, word),
        f"![{word.capitalize()} per iteration: mean and range of the seeds{dashed}]({runs_report.CURVES_PNG})",
    ]


def successes(agents: Agents) -> dict[str, NDArray[np.float64]]:
    """Success [S, N] by agent, questions in one order. A ValueError refuses other questions, and episodes cut short."""
    first, *others = [evaluation for seeds in agents.values() for evaluation in seeds]
    if aborted := comparison.cut_short([first, *others]):
        raise ValueError(f"the world cut episodes short, {aborted}: their questions are missing; evaluate again")
    if unlike := next((each for each in others if each.asked != first.asked), None):
        both, counts = f"{unlike.name} and {first.name}", f"{len(unlike.success)} and {len(first.success)} of them"
        remedy = "evaluate both again under the same configuration"
        raise ValueError(f"{both} answered different questions, {counts}; {remedy}")
    ordered = {
        name: [[hit for _, hit in sorted(each.success.items())] for each in seeds] for name, seeds in agents.items()
    }
    return {name: np.array(hits, dtype=np.float64) for name, hits in ordered.items()}


def _strata(evaluation: Evaluation, questions: Sequence[Question], name: str) -> Chosen:
    """The questions in each value of a stratum such as hops, in the order of `successes`."""
    strata = {each.question_id: f"{name}_{each.strata[name]}" if name in each.strata else "" for each in questions}
    found = np.array([strata[question_id] for question_id in sorted(evaluation.success)])
    values = sorted(set(found.tolist()) - {""}, key=runs_report.in_order)
    return {runs_report.stratum_title(each): found == each for each in values}


def _scores_by_seed(agents: Agents, hits: Hits, found: Mapping[str, Interval], strata: Chosen) -> str:
    greedy = {name: [each.greedily for each in seeds if each.greedily is not None] for name, seeds in agents.items()}
    beside, rows = [scores.GREEDILY] * any(greedy.values()), []
    for name, values in hits.items():
        seeds = " ".join(f"{mean:.3f}" for mean in values.mean(axis=1))
        of_each = [f"{values[:, chosen].mean():.3f}" for chosen in strata.values()]
        greedily = [_mean(greedy[name], 3)] * len(beside)
        rows.append([f"`{name}`", comparison.mean_cell(found[name]), seeds, *greedily, *of_each])
    return comparison.markdown_table(["agent", "all", "single seeds", *beside, *strata], rows)


def _training(curves: Mapping[str, Sequence[Curve]], word: str) -> str:
    everyone, several = [curve for seeds in curves.values() for curve in seeds], len(curves) > 1
    shortest = min(plots.spent(curve, "seconds")[-1] for curve in everyone)
    compared = [f"at equal time, {shortest / 60:.1f} min"] * several
    header = ["run", "iterations", f"sampled {word}", *compared, "on dev", "explained"]
    rows = []
    for run, seeds in curves.items():
        ends = [metrics for curve in seeds for metrics in curve[-AT_THE_END:]]
        in_time = [metrics for curve in seeds for metrics in _until(curve, shortest)[-AT_THE_END:]]
        alarms = [[int(metrics["iteration"]) for metrics in curve if metrics["monitor/alarms"]] for curve in seeds]
        validated = [[metrics[VALIDATED] for metrics in curve if VALIDATED in metrics][-1:] for curve in seeds]
        rows.append(
            [
                f"`{run}`",
                str(len(seeds[0])),
                _mean([metrics[SAMPLED] for metrics in ends], 3),
                *[_mean([metrics[SAMPLED] for metrics in in_time], 3)] * several,
                _mean([score for scores in validated for score in scores], 3),
                _mean([metrics[EXPLAINED] for metrics in ends if EXPLAINED in metrics], 2),
                ", ".join(str(iterations[0]) if iterations else "none" for iterations in alarms),
            ]
        )
    return comparison.markdown_table([*header, "first alarm, by seed"], rows)


def _counted(numbers: Sequence[int], noun: str) -> str:
    """`1 run`, `3 or 5 seeds`."""
    return f"{' or '.join(map(str, numbers))} {noun}{'s' * (numbers[-1] != 1)}"


def _mean(values: Sequence[float], decimals: int) -> str:
    return f"{np.mean(values):.{decimals}f}" if values else runs_report.ABSENT


def _until(curve: Curve, seconds: float) -> Curve:
    """The iterations that ended within `seconds` of training."""
    return [row for row, after in zip(curve, plots.spent(curve, "seconds")[1:], strict=True) if after <= seconds]
