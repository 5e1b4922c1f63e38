"""The report of single runs: a Markdown page with pictures, and small files for DVC."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agent_r1.evaluation.comparison import (
    Evaluation,
    above_chance,
    difference_cell,
    interval_of,
    markdown_table,
    mean_cell,
    paired,
    warning,
)
from agent_r1.evaluation.plots import SAMPLED, Curve, Curves, final_scores, learning_curves
from agent_r1.evaluation.scores import SUCCESS, outcomes, score
from agent_r1.evaluation.statistics import Interval, paired_difference
from agent_r1.evaluation.transcript import examples
from agent_r1.files import replaced_folder, write_text
from agent_r1.harmless import in_markdown
from agent_r1.params.stages import EvaluateParams
from agent_r1.records import Decode, Question, words_of

CURVES_PNG, FINAL_PNG = "learning_curves.png", "final_scores.png"
ABSENT = "n/a"
DRAWN = {SUCCESS: SAMPLED, "reward": "reward/total"}  # file -> metric
DECIMALS = 4
STRATA = {"hops": "number of hops", "kind": "kind of question"}  # in words, if the name is not enough

NO_BOUND = (
    " `gold_passages` is below it: that is the warm start, whose searches it bounds, and not those of a trained run."
)

AgentScores = Mapping[str, Mapping[str, float]]  # agent -> its scores, see `score`


def render(
    evaluations: Sequence[Evaluation],
    curves: Curves,
    questions: Sequence[Question],
    decode: Decode,
    folder: Path,
    params: EvaluateParams,
) -> dict[str, Interval]:
    """Writes report.md, learning_curves.png and final_scores.png into `folder`; returns every agent's success.

    The agents in `curves` are trained runs, the others baselines. Every agent is compared with the first run and the
    first baseline.
    """
    scores = {e.name: score(e.predictions, questions, params) | outcomes(e.trajectories) for e in evaluations}
    baselines = {name: row[SUCCESS] for name, row in scores.items() if name not in curves}
    best = max(curves or scores, key=lambda name: scores[name][SUCCESS])
    final = {name: interval_of(row, SUCCESS) for name, row in scores.items()}
    word = words_of(questions).right
    passed = baselines.get("gold_passages", 1.0) < scores[best][SUCCESS]
    learning_curves(folder / CURVES_PNG, curves, baselines, word)
    final_scores(folder / FINAL_PNG, final, list(curves), {}, word)
    parts = [
        "# Report",
        f"{len(scores)} agents, {scores[best]['questions']:.0f} test questions, greedy decoding. Brackets are 95 % "
        f"bootstrap intervals over questions. Highest {word}: `{best}`, {_cell(scores[best], SUCCESS)}."
        + (NO_BOUND if passed else ""),
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
    write_page(folder, parts)
    return final


def write_page(folder: Path, parts: Sequence[str]) -> None:
    write_text(folder / "report.md", "\n\n".join(parts) + "\n")


def differences_table(agents: Sequence[str], references: Sequence[str], cell: Callable[[str, str], str]) -> str:
    """A row per agent and a column per reference. `cell` gives the text for an agent and a reference."""
    rows = [[f"`{name}`", *(cell(name, other) for other in references)] for name in agents]
    return markdown_table(["agent", *(f"less `{other}`" for other in references)], rows)


def _tables(scores: AgentScores, questions: Sequence[Question]) -> list[str]:
    """All measures by data set and by the first stratum, success by the other strata, then tokens."""

    def by(stratum: str, titles: Mapping[str, str]) -> list[str]:
        values = _strata(scores, stratum)
        return [part for title, measure in titles.items() for part in (title, _table(scores, measure, values))]

    word, strata = words_of(questions).right.capitalize(), strata_of(questions)
    first, answered = strata[0] if strata else "", any("f1" in row for row in scores.values())
    graded = {f"### {word}": SUCCESS} | ({"### F1": "f1"} if answered else {})
    calls = {"### Tool calls per question" if answered else "### Calls per question": "tool_calls"}
    tokens = [
        [_agent(name, row), *(_cell(row, key, 1) for key in ("tokens_read", "tokens_sampled"))]
        for name, row in scores.items()
    ]
    return [
        *(["## Scores by data set", *by("dataset", graded)] if _strata(scores, "dataset") else []),
        f"## Scores by {STRATA.get(first, first)}" if first else "## Scores",
        *by(first, graded | calls),
        *(part for name in strata[1:] for part in by(name, {f"## {word} by {STRATA.get(name, name)}": SUCCESS})),
        "## Tokens per question",
        "Sampled tokens are the policy's actions; all others it reads. Each counts once, as with a cache.",
        markdown_table(["agent", "read", "sampled"], tokens),
    ]


def strata_of(questions: Sequence[Question]) -> list[str]:
    """The names of the questions' strata, such as hops and kind."""
    return list(dict.fromkeys(name for question in questions for name in question.strata))


def _strata(scores: AgentScores, name: str) -> list[str]:
    """The values of a stratum in order. A single data set is none."""
    start = f"questions/{name}_"
    found = {key.split("/")[1] for row in scores.values() for key in row if name and key.startswith(start)}
    return sorted(found, key=in_order)


def in_order(stratum: str) -> tuple[int, str]:
    """A sort key: numbers by size, other strata by letters."""
    number = re.match(r"\w*?_(\d+)", stratum)
    return (int(number[1]) if number else 0, stratum)


def stratum_title(stratum: str) -> str:
    name, _, value = stratum.partition("_")
    return in_markdown(value) if name != "hops" else f"{value} hop" if value == "1" else f"{value} hops"


def _table(scores: AgentScores, measure: str, strata: Sequence[str]) -> str:
    keys = [measure, *(f"{measure}/{stratum}" for stratum in strata)]
    rows = [[_agent(name, row), *(_cell(row, key) for key in keys)] for name, row in scores.items()]
    return markdown_table(["agent", "all", *map(stratum_title, strata)], rows)


def _agent(name: str, row: Mapping[str, float]) -> str:
    """An agent's name, with the number of its aborted episodes if there are any."""
    aborted = f" (aborted: {row['aborted']:.0f} of {row['aborted'] + row['questions']:.0f})" if row["aborted"] else ""
    return f"`{name}`{aborted}"


def _cell(scores: Mapping[str, float], key: str, decimals: int = 3) -> str:
    return mean_cell(interval_of(scores, key), decimals) if key in scores else ABSENT


def _differences(evaluations: Sequence[Evaluation], references: Sequence[str], params: EvaluateParams) -> str:
    by_name = {e.name: e for e in evaluations}

    def cell(name: str, other: str) -> str:
        if name == other or by_name[name].asked != by_name[other].asked:
            return ABSENT
        values = paired(by_name[name], by_name[other])
        return difference_cell(paired_difference(*values, params.bootstrap_samples, params.seed))

    return differences_table(list(by_name), references, cell)


def write_scores(folder: Path, scores: Mapping[str, Interval]) -> None:
    """Writes a file per agent with its success. DVC sorts the columns, so the bounds are named around it."""
    with replaced_folder(folder) as fresh:
        for name, found in scores.items():
            row = {"lower": found.low, SUCCESS: found.mean, "upper": found.high}
            rounded = {key: round(value, DECIMALS) for key, value in row.items()}
            write_text(fresh / f"{name}.json", json.dumps(rounded, indent=2) + "\n")


def write_curves(folder: Path, curves: Mapping[str, Sequence[Curve]]) -> None:
    """Writes a file per metric of `DRAWN`: a row per iteration with the mean of each run's seeds.

    A run has null at an iteration unless all its seeds have a value.
    """
    with replaced_folder(folder) as fresh:
        for name, metric in DRAWN.items():
            means = {run: _means(seeds, metric) for run, seeds in curves.items()}
            iterations = sorted(set[int]().union(*means.values()))
            rows = [{"iteration": each} | {run: found.get(each) for run, found in means.items()} for each in iterations]
            write_text(fresh / f"{name}.json", "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def _means(seeds: Sequence[Curve], metric: str) -> dict[int, float]:
    """The mean of the seeds by iteration, if all have a value."""
    values = defaultdict[int, list[float]](list)
    for row in (row for rows in seeds for row in rows if metric in row):
        values[int(row["iteration"])].append(row[metric])
    return {each: round(sum(of) / len(of), DECIMALS) for each, of in values.items() if len(of) == len(seeds)}
