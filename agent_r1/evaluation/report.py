"""The reports: one Markdown page and two pictures, of some runs or of a sweep with every seed.

S = seeds, N = questions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent_r1.evaluation.comparison import (
    Evaluation,
    above_chance,
    cut_short,
    difference_cell,
    markdown_table,
    mean_cell,
    paired,
    warning,
)
from agent_r1.evaluation.plots import (
    EXPLAINED,
    SAMPLED,
    VALIDATED,
    Curve,
    Curves,
    final_scores,
    learning_curves,
    seed_curves,
)
from agent_r1.evaluation.scores import CEILING, FLOOR, SUCCESS, outcomes, score
from agent_r1.evaluation.statistics import Interval, difference_over_seeds, interval_over_seeds, paired_difference
from agent_r1.evaluation.transcript import PlainText, examples
from agent_r1.files import write_text
from agent_r1.harmless import in_markdown
from agent_r1.params.stages import EvaluateParams
from agent_r1.records import Question, words_of

CURVES_PNG, FINAL_PNG = "learning_curves.png", "final_scores.png"
ABSENT = "n/a"
AT_THE_END = 3  # iterations
STRATA = {"hops": "number of hops", "kind": "kind of question"}  # in words, where the name is not enough

Scores = Mapping[str, Mapping[str, float]]  # agent -> what `score` makes of its predictions
Agents = Mapping[str, Sequence[Evaluation]]  # by run or baseline, an evaluation per seed
Hits = Mapping[str, NDArray[np.float64]]  # by run or baseline, success [S, N] of every seed and question


def render(
    evaluations: Sequence[Evaluation],
    curves: Curves,
    questions: Sequence[Question],
    decode: PlainText,
    folder: Path,
    params: EvaluateParams,
) -> dict[str, Interval]:
    """Writes report.md, learning_curves.png and final_scores.png into `folder`; returns every agent's success.

    The agents in `curves` are the trained runs, the others baselines; both keep their order, and the first of each are
    what all agents are compared with.
    """
    scores = {e.name: score(e.predictions, questions, params) | outcomes(e.trajectories) for e in evaluations}
    baselines = {name: row[SUCCESS] for name, row in scores.items() if name not in curves}
    best = max(curves or scores, key=lambda name: scores[name][SUCCESS])
    final = {name: _interval(row, SUCCESS) for name, row in scores.items()}
    word = words_of(questions).right
    learning_curves(folder / CURVES_PNG, curves, baselines, word)
    final_scores(folder / FINAL_PNG, final, list(curves), {}, word)
    parts = [
        "# Report",
        f"{len(scores)} agents, {scores[best]['questions']:.0f} test questions, greedy decoding. Brackets are 95 % "
        f"bootstrap intervals over questions. Highest {word}: `{best}`, {_cell(scores[best], SUCCESS)}.",
        *warning(evaluations),
        *above_chance(final),
        f"![{word.capitalize()} on the test questions, per agent]({FINAL_PNG})",
        *_tables(scores, questions),
        f"## {word.capitalize()}, difference on the same questions",
        "The row's agent less the column's, paired by question. **Bold** where the interval leaves out 0.",
        _differences(evaluations, [*list(curves)[:1], *list(baselines)[:1]], params),
        "## Learning curves",
        f"![{word.capitalize()}, reward, and what critics explain, per iteration]({CURVES_PNG})",
        *examples({e.name: e.trajectories for e in evaluations}, list(curves), questions, decode),
    ]
    _write_page(folder, parts)
    return final


def _write_page(folder: Path, parts: Sequence[str]) -> None:
    write_text(folder / "report.md", "\n\n".join(parts) + "\n")


def differences_table(agents: Sequence[str], references: Sequence[str], cell: Callable[[str, str], str]) -> str:
    """A row per agent and a column per reference; `cell` gives the text of an agent and a reference."""
    rows = [[f"`{name}`", *(cell(name, other) for other in references)] for name in agents]
    return markdown_table(["agent", *(f"less `{other}`" for other in references)], rows)


def _tables(scores: Scores, questions: Sequence[Question]) -> list[str]:
    """By data set and by the first of the strata in full, by the others success alone; then tokens."""
    word, [first, *others] = words_of(questions).right.capitalize(), [*strata_of(questions), ""]
    datasets, answered = _strata(scores, "dataset_"), any("f1" in row for row in scores.values())
    graded = {f"### {word}": SUCCESS} | ({"### F1": "f1"} if answered else {})
    by_dataset = [part for title, key in graded.items() for part in (title, _table(scores, key, datasets))]
    with_calls = graded | {"### Tool calls per question" if answered else "### Calls per question": "tool_calls"}
    tokens = ("tokens_read", "tokens_sampled")
    rows = [[_agent(name, row), *(_cell(row, key, 1) for key in tokens)] for name, row in scores.items()]
    return [
        *(["## Scores by data set", *by_dataset] if datasets else []),
        f"## Scores by {STRATA.get(first, first)}" if first else "## Scores",
        *(part for title, key in with_calls.items() for part in (title, _table(scores, key, _strata(scores, first)))),
        *(
            part
            for name in others[:-1]
            for part in (f"## {word} by {STRATA.get(name, name)}", _table(scores, SUCCESS, _strata(scores, name)))
        ),
        "## Tokens per question",
        "Sampled tokens are the policy's actions; all others it reads. Each counts once, as with a cache.",
        markdown_table(["agent", "read", "sampled"], rows),
    ]


def strata_of(questions: Sequence[Question]) -> list[str]:
    """What results are told apart by, as the questions name it."""
    return list(dict.fromkeys(name for question in questions for name in question.strata))


def _strata(scores: Scores, name: str) -> list[str]:
    """The strata of a name, numbers in their order; none of data sets where there is one."""
    found = {
        key.split("/")[1] for row in scores.values() for key in row if name and key.startswith(f"questions/{name}_")
    }
    return sorted(found, key=_in_order)


def _in_order(stratum: str) -> tuple[int, str]:
    """Numbers by their size, other strata by their letters."""
    number = re.match(r"\w*?_(\d+)", stratum)
    return (int(number[1]) if number else 0, stratum)


def _table(scores: Scores, measure: str, strata: Sequence[str]) -> str:
    keys = [measure, *(f"{measure}/{stratum}" for stratum in strata)]
    rows = [[_agent(name, row), *(_cell(row, key) for key in keys)] for name, row in scores.items()]
    return markdown_table(["agent", "all", *map(_stratum_title, strata)], rows)


def _agent(name: str, row: Mapping[str, float]) -> str:
    """An agent beside its scores, with how many episodes are in none of them."""
    aborted = f" (aborted: {row['aborted']:.0f} of {row['aborted'] + row['questions']:.0f})" if row["aborted"] else ""
    return f"`{name}`{aborted}"


def _stratum_title(stratum: str) -> str:
    what, _, value = stratum.partition("_")
    return in_markdown(value) if what != "hops" else f"{value} hop" if value == "1" else f"{value} hops"


def _differences(evaluations: Sequence[Evaluation], references: Sequence[str], params: EvaluateParams) -> str:
    by_name = {e.name: e for e in evaluations}

    def cell(name: str, other: str) -> str:
        if name == other or by_name[name].asked != by_name[other].asked:
            return ABSENT
        values = paired(by_name[name], by_name[other])
        return difference_cell(paired_difference(*values, params.bootstrap_samples, params.seed))

    return differences_table(list(by_name), references, cell)


def _interval(scores: Mapping[str, float], key: str) -> Interval:
    return Interval(mean=scores[key], low=scores[f"{key}/low"], high=scores[f"{key}/high"])


def _cell(scores: Mapping[str, float], key: str, decimals: int = 3) -> str:
    return mean_cell(_interval(scores, key), decimals) if key in scores else ABSENT


def render_sweep(
    runs: Agents,
    baselines: Sequence[Evaluation],
    curves: Mapping[str, Sequence[Curve]],
    questions: Sequence[Question],
    folder: Path,
    params: EvaluateParams,
) -> dict[str, Interval]:
    """Writes report.md, learning_curves.png and final_scores.png into `folder`; returns every agent's success.

    The first run and the first baseline are what the others are compared with.
    """
    agents = {**runs, **{baseline.name: [baseline] for baseline in baselines}}
    hits, draws = successes(agents), (params.bootstrap_samples, params.seed)
    found = {name: interval_over_seeds(values, *draws) for name, values in hits.items()}
    of_seeds = {name: hits[name].mean(axis=1).tolist() for name in runs}
    reference, base = next(iter(runs)), baselines[0].name
    seeds, asked = sorted({len(evaluations) for evaluations in runs.values()}), hits[reference].shape[1]

    def difference(name: str, other: str) -> str:
        return difference_cell(difference_over_seeds(hits[name], hits[other], *draws)) if name != other else ""

    word = words_of(questions).right
    final_scores(folder / FINAL_PNG, found, list(runs), of_seeds, word)
    title = f"{word.capitalize()} of the sampled episodes, by iteration"
    limits = {str(name): found[name].mean for name in (FLOOR, CEILING) if name in found}
    seed_curves(folder / CURVES_PNG, curves, reference, SAMPLED, title, limits)
    compared = list(dict.fromkeys([reference, base, *(name for name in limits if name == FLOOR)]))
    parts = [
        "# Ablations",
        f"{len(runs)} runs with {' or '.join(map(str, seeds))} seeds each, {asked} test questions, greedy decoding. "
        "Brackets are 95 % bootstrap intervals over questions and seeds; of a baseline, which has one seed, over "
        "questions.",
        *warning([evaluation for evaluations in agents.values() for evaluation in evaluations]),
        *above_chance(found),
        f"![{word.capitalize()} on the test questions, per agent and seed]({FINAL_PNG})",
        f"## {word.capitalize()}",
        _scores_by_seed(hits, found, _by_stratum(next(iter(agents.values()))[0], questions)),
        "## Differences on the same questions",
        "The row's agent less the column's. **Bold** where the interval leaves out 0; it is over questions and seeds.",
        differences_table(list(hits), compared, difference),
        "## Training",
        f"Sampled {word} is of the training rollouts, over the last {AT_THE_END} iterations and all seeds, and so "
        f"is the share of its targets' variance that a critic explains. On dev is the {word} of the last "
        "validation, greedy: what is chosen among runs is chosen by it. An alarm is the collapse monitor's; the "
        "iteration is that of the first one.",
        _training(curves, word),
        f"![{word.capitalize()} per iteration: mean and range of the seeds, dashed: {reference}]({CURVES_PNG})",
    ]
    _write_page(folder, parts)
    return found


def successes(agents: Agents) -> dict[str, NDArray[np.float64]]:
    """By agent, success [S, N] of every seed; the questions are in the same order everywhere."""
    evaluations = [(name, evaluation) for name, seeds in agents.items() for evaluation in seeds]
    first, asked = evaluations[0][0], evaluations[0][1].asked
    if aborted := cut_short([evaluation for _, evaluation in evaluations]):
        raise ValueError(f"the world cut episodes short, {aborted}: their questions are missing; evaluate again")
    for name, evaluation in evaluations:
        if evaluation.asked != asked:
            raise ValueError(
                f"{name} and {first} answered different questions; evaluate both again under the same configuration"
            )
    return {
        name: np.array([[one for _, one in sorted(each.success.items())] for each in seeds], dtype=np.float64)
        for name, seeds in agents.items()
    }


def _by_stratum(evaluation: Evaluation, questions: Sequence[Question]) -> dict[str, NDArray[np.bool_]]:
    """By the first of the strata, such as hops, which questions [N] are in it, in the order of `successes`."""
    strata = {
        each.question_id: next((f"{name}_{value}" for name, value in each.strata.items()), "") for each in questions
    }
    found = np.array([strata[question_id] for question_id in sorted(evaluation.success)])
    return {_stratum_title(each): found == each for each in sorted(set(found.tolist()) - {""}, key=_in_order)}


def _scores_by_seed(hits: Hits, found: Mapping[str, Interval], strata: Mapping[str, NDArray[np.bool_]]) -> str:
    rows = []
    for name, values in hits.items():
        seeds = " ".join(f"{mean:.3f}" for mean in values.mean(axis=1))
        of_each = [f"{values[:, chosen].mean():.3f}" for chosen in strata.values()]
        rows.append([f"`{name}`", mean_cell(found[name]), seeds, *of_each])
    return markdown_table(["agent", "all", "single seeds", *strata], rows)


def _training(curves: Mapping[str, Sequence[Curve]], word: str) -> str:
    rows = []
    for run, seeds in curves.items():
        alarmed = [[metrics["iteration"] for metrics in curve if metrics["monitor/alarms"]] for curve in seeds]
        firsts = [str(int(iterations[0])) if iterations else "none" for iterations in alarmed]
        sampled = np.mean([metrics[SAMPLED] for curve in seeds for metrics in curve[-AT_THE_END:]])
        shares = [metrics[EXPLAINED] for curve in seeds for metrics in curve[-AT_THE_END:] if EXPLAINED in metrics]
        explained = f"{np.mean(shares):.2f}" if shares else ABSENT
        validated = [[metrics[VALIDATED] for metrics in curve if VALIDATED in metrics] for curve in seeds]
        last = [scores[-1] for scores in validated if scores]
        dev = f"{np.mean(last):.3f}" if last else ABSENT
        minutes = f"{np.mean([_seconds(curve) for curve in seeds]) / 60:.1f}"
        rows.append([f"`{run}`", str(len(seeds[0])), f"{sampled:.3f}", dev, explained, ", ".join(firsts), minutes])
    header = ["run", "iterations", f"sampled {word}", "on dev", "explained", "first alarm, by seed"]
    return markdown_table([*header, "minutes per seed"], rows)


def _seconds(curve: Curve) -> float:
    """The sum of `time/*_s`, the only metrics that add up to a time."""
    return sum(value for metrics in curve for name, value in metrics.items() if fnmatch(name, "time/*_s"))
