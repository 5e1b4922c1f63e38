"""The report of a sweep with all seeds. S = seeds, N = questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from agent_r1.evaluation import comparison, plots, runs_report, scores
from agent_r1.evaluation.comparison import Evaluation
from agent_r1.evaluation.plots import SAMPLED, VALIDATED, Curve, final_scores, seed_curves
from agent_r1.evaluation.scores import CEILING, FLOOR
from agent_r1.evaluation.statistics import RECIPE_SEEDS, Interval, difference_over_seeds, interval_over_seeds
from agent_r1.params.stages import Budget, EvaluateParams
from agent_r1.records import Floats, Mask, Question, words_of

AT_THE_END = 3  # iterations
EXPLAINED = "value/explained_return"  # logged if there is a critic
TOLERANCE = 0.05  # share of a budget by which runs may differ that have it alike

Agents = Mapping[str, Sequence[Evaluation]]  # by run or baseline, an evaluation per seed
Hits = Mapping[str, Floats]  # by run or baseline, success [S, N] of every seed and question
Chosen = Mapping[str, Mask]  # by stratum, which questions [N] are in it


@dataclass(frozen=True, kw_only=True, slots=True)
class SweptAgents:
    """Runs with every seed, baselines with one, and the runs that all others are compared with."""

    runs: Agents
    baselines: Sequence[Evaluation]
    curves: Mapping[str, Sequence[Curve]]  # by run, a curve per seed
    plan: str  # the paragraph of `told_apart`
    references: Sequence[str] = ()  # the first run and the first baseline if empty
    equal: Budget = "episodes"  # that runs should have alike
    title: str = "Ablations"

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
    agents = sweep.agents
    draws = (params.bootstrap_samples, params.seed)
    hits = successes(agents)
    word = words_of(questions).right
    means = {name: interval_over_seeds(values, *draws) for name, values in hits.items()}
    reference = next(iter(sweep.runs))
    answered = comparison.decoding(agents[reference][0].hashes)
    _draw(sweep, hits, means, folder, (word, answered))
    strata = {name: _strata(agents[reference][0], questions, name) for name in runs_report.strata_of(questions)}
    parts = [
        f"# {sweep.title}",
        f"{_sizes(sweep, hits)}, {answered}. Brackets are 95 % intervals: over questions and seeds from "
        f"{RECIPE_SEEDS} seeds on, else of these policies, over questions.",
        sweep.plan,
        *comparison.warning([*chain.from_iterable(agents.values())]),
        *comparison.above_chance(means),
        f"![{word.capitalize()} on the test questions, per agent and seed]({runs_report.FINAL_PNG})",
        f"## {word.capitalize()}",
        _scores_by_seed(agents, hits, means, next(iter(strata.values()), {})),
        *runs_report.budgets(sweep.curves, means, word),
        _with_budgets(sweep, _differences(sweep, hits, strata, draws)),
        *_about_training(sweep.curves, reference, word),
    ]
    runs_report.write_page(folder, parts)
    return means


def _draw(sweep: SweptAgents, hits: Hits, means: Mapping[str, Interval], folder: Path, words: tuple[str, str]) -> None:
    """Draws the final scores and the curves of all seeds. The words are for success, and how the agents answered."""
    by_seed = {name: hits[name].mean(axis=1).tolist() for name in sweep.runs}
    final_scores(folder / runs_report.FINAL_PNG, means, list(sweep.runs), by_seed, words)
    reference = next(iter(sweep.runs))
    title = f"{words[0].capitalize()} of the sampled episodes, by {plots.axis_of(sweep.curves[reference][0])}"
    limits = {str(name): means[name].mean for name in (FLOOR, CEILING) if name in means}
    seed_curves(folder / runs_report.CURVES_PNG, sweep.curves, reference, SAMPLED, title, limits)


def _sizes(sweep: SweptAgents, hits: Hits) -> str:
    """The runs, seeds and questions of a sweep in words."""
    seeds = sorted({len(evaluations) for evaluations in sweep.runs.values()})
    several = len(sweep.runs) > 1
    questions = hits[next(iter(sweep.runs))].shape[1]
    return (
        f"{_counted([len(sweep.runs)], 'run')} with {_counted(seeds, 'seed')}{' each' * several}, "
        f"{_counted([questions], 'test question')}"
    )


def _with_budgets(sweep: SweptAgents, differences: Sequence[str]) -> str:
    """The runs that differ from the first in the budget that should be equal; everywhere their names say how far."""
    first, *rest = sweep.runs
    amounts = {run: plots.taken(seeds, sweep.equal) for run, seeds in sweep.curves.items()}
    shares = {run: amounts[run] / (amounts[first] or 1) - 1 for run in rest}
    apart = [run for run in rest if not abs(shares[run]) <= TOLERANCE]
    words = plots.BUDGETS[sweep.equal][0]
    names = ", ".join(f"`{run}`" for run in apart) or "none"
    sentence = f"Runs should have equal {words}. More than {100 * TOLERANCE:.0f} % from `{first}`: {names}."
    text = "\n\n".join([*[sentence] * bool(rest), *differences])
    for run in apart:
        text = text.replace(f"`{run}`", f"`{run}` ({100 * shares[run]:+.0f} %)")
    return text.replace("+nan %", "not known")


def _differences(sweep: SweptAgents, hits: Hits, strata: Mapping[str, Chosen], draws: tuple[int, int]) -> list[str]:
    """Paragraphs with the differences from every reference, and from the first run by each of the strata."""
    first = next(iter(sweep.runs))
    bases = [baseline.name for baseline in sweep.baselines[:1]]

    def difference(name: str, reference: str, members: Mask | slice = slice(None)) -> Interval:
        return difference_over_seeds(hits[name][:, members], hits[reference][:, members], *draws)

    references = dict.fromkeys([*(sweep.references or (first, *bases)), *([FLOOR] if FLOOR in hits else [])])
    parts = [
        "## Differences on the same questions",
        *runs_report.differences(
            list(hits),
            list(references),
            lambda name, reference: difference(name, reference) if name != reference else None,
        ),
    ]
    for name, stratum in strata.items():
        if len(stratum) > 1:
            parts.append(f"## Differences from `{first}` by {runs_report.STRATA.get(name, name)}")
            rows = [
                [f"`{agent}`", *(comparison.difference_cell(difference(agent, first, of)) for of in stratum.values())]
                for agent in hits
                if agent != first
            ]
            parts.append(comparison.markdown_table(["agent", *stratum], rows))
    return parts


def _about_training(curves: Mapping[str, Sequence[Curve]], reference: str, word: str) -> list[str]:
    several = len(curves) > 1
    reached = f"the last {AT_THE_END} iterations that had ended when the fastest training"
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


def successes(agents: Agents) -> dict[str, Floats]:
    """Success [S, N] by agent, questions in one order. A ValueError refuses other questions, and episodes cut short."""
    evaluations = [*chain.from_iterable(agents.values())]
    if aborted := comparison.cut_short(evaluations):
        raise ValueError(f"the world cut episodes short, {aborted}: their questions are missing; evaluate again")
    first = evaluations[0]
    for evaluation in evaluations:
        if evaluation.asked != first.asked:
            counts = f"{len(evaluation.success)} and {len(first.success)} of them"
            raise ValueError(
                f"{evaluation.name} and {first.name} answered different questions, {counts}; evaluate both again under "
                "the same configuration"
            )
    return {
        name: np.array(
            [[hit for _, hit in sorted(evaluation.success.items())] for evaluation in seeds], dtype=np.float64
        )
        for name, seeds in agents.items()
    }


def _strata(evaluation: Evaluation, questions: Sequence[Question], name: str) -> Chosen:
    """The questions in each value of a stratum such as hops, in the order of `successes`."""
    strata = {row.question_id: f"{name}_{row.strata[name]}" if name in row.strata else "" for row in questions}
    labels = np.array([strata[question_id] for question_id in sorted(evaluation.success)])
    values = sorted(set(labels.tolist()) - {""}, key=runs_report.in_order)
    return {runs_report.stratum_title(value): labels == value for value in values}


def _scores_by_seed(agents: Agents, hits: Hits, means: Mapping[str, Interval], strata: Chosen) -> str:
    greedy = {
        name: [evaluation.greedily for evaluation in seeds if evaluation.greedily is not None]
        for name, seeds in agents.items()
    }
    beside = [scores.GREEDILY] * any(greedy.values())
    rows = []
    for name, values in hits.items():
        seeds = " ".join(f"{mean:.3f}" for mean in values.mean(axis=1))
        by_stratum = [f"{values[:, members].mean():.3f}" for members in strata.values()]
        greedily = [_mean(greedy[name], 3)] * len(beside)
        rows.append([f"`{name}`", comparison.mean_cell(means[name]), seeds, *greedily, *by_stratum])
    return comparison.markdown_table(["agent", "all", "single seeds", *beside, *strata], rows)


def _training(curves: Mapping[str, Sequence[Curve]], word: str) -> str:
    shortest = min(plots.spent(curve, "seconds")[-1] for curve in chain.from_iterable(curves.values()))
    at_equal_time = [f"at equal time, {shortest / 60:.1f} min"] * bool(len(curves) > 1 and shortest > 0)
    rows = []
    for run, seeds in curves.items():
        ends = [metrics for curve in seeds for metrics in curve[-AT_THE_END:]]
        in_time = [metrics for curve in seeds for metrics in _until(curve, shortest)[-AT_THE_END:]]
        rows.append(
            [
                f"`{run}`",
                str(len(seeds[0])),
                _mean([metrics[SAMPLED] for metrics in ends], 3),
                *[_mean([metrics[SAMPLED] for metrics in in_time], 3)] * len(at_equal_time),
                _mean([score for curve in seeds for score in _validations(curve)[-1:]], 3),
                _mean([metrics[EXPLAINED] for metrics in ends if EXPLAINED in metrics], 2),
                ", ".join(map(_first_alarm, seeds)),
            ]
        )
    header = ["run", "iterations", f"sampled {word}", *at_equal_time, "on dev", "explained", "first alarm, by seed"]
    return comparison.markdown_table(header, rows)


def _validations(curve: Curve) -> list[float]:
    return [metrics[VALIDATED] for metrics in curve if VALIDATED in metrics]


def _first_alarm(curve: Curve) -> str:
    """The iteration of the first alarm."""
    iterations = (str(int(metrics["iteration"])) for metrics in curve if metrics.get("monitor/alarms"))
    return next(iterations, "none" if "monitor/alarms" in curve[0] else runs_report.ABSENT)


def _counted(numbers: Sequence[int], noun: str) -> str:
    """`1 run`, `3 or 5 seeds`."""
    return f"{' or '.join(map(str, numbers))} {noun}{'s' * (numbers[-1] != 1)}"


def _mean(values: Sequence[float], decimals: int) -> str:
    return f"{np.mean(values):.{decimals}f}" if values else runs_report.ABSENT


def _until(curve: Curve, seconds: float) -> Curve:
    """The iterations that ended within `seconds` of training."""
    return [row for row, end in zip(curve, plots.spent(curve, "seconds")[1:], strict=True) if end <= seconds]
