"""The report of single runs: a Markdown page with pictures, and small files for DVC."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from statistics import fmean, median

from agent_r1.costs import costs_in
from agent_r1.evaluation import comparison
from agent_r1.evaluation.comparison import Evaluation
from agent_r1.evaluation.plots import BUDGETS, SAMPLED, Curve, Curves, final_scores, gained, learning_curves, taken
from agent_r1.evaluation.scores import BASE_TOOL_CALL, GREEDILY, SUCCESS, outcomes, score
from agent_r1.evaluation.statistics import LEVEL, Interval, paired_difference
from agent_r1.evaluation.transcript import examples
from agent_r1.files import METRICS, read_metrics, replaced_folder, write_json, write_text
from agent_r1.harmless import in_markdown
from agent_r1.params.stages import EvaluateParams
from agent_r1.records import Decode, Question, words_of

CURVES_PNG = "learning_curves.png"
FINAL_PNG = "final_scores.png"
COSTS = "costs.md"
ABSENT = "n/a"
UNSHOWN = "as many questions and seeds show no smaller difference"
DRAWN = {SUCCESS: SAMPLED, "reward": "reward/total"}  # file -> metric
DECIMALS = 4
STRATA = {"hops": "number of hops", "kind": "kind of question"}  # in words, if the name is not enough

PURPOSES = ("sampling", "tools", "learning", "proof", "writing", "other")
COST_ROWS = (*PURPOSES, "training", "evaluation", "tokens sampled", "tokens trained", "GiB", "money", "per point")
ABOUT_COSTS = f"""Core-seconds / device-seconds by purpose, means of the seeds. GiB are of a GPU, else of the machine. \
Money is the training's. Per point: its core-seconds per percentage point of success over `{BASE_TOOL_CALL}`."""

NO_BOUND = (
    " `gold_passages` is below it: that is the warm start, whose searches it bounds, and not those of a trained run."
)

GAINED = {"half its gain": 0.5, "nine tenths": 0.9}
ABOUT_BUDGETS = """Of one training; of several seeds, the mean. The last columns are the episodes after which a \
run had half and nine tenths of its gain: that of sampled success, from its first three iterations to its last three."""

AgentScores = Mapping[str, Mapping[str, float]]  # agent -> its scores, see `score`


def render(
    evaluations: Sequence[Evaluation],
    curves: Curves,
    questions: Sequence[Question],
    decode: Decode,
    folder: Path,
    params: EvaluateParams,
    plan: str,
) -> dict[str, Interval]:
    """Writes report.md, learning_curves.png and final_scores.png into `folder`; returns every agent's success.

    The agents in `curves` are trained runs, the others baselines. Every agent is compared with the first run and the
    first baseline. `plan` is the paragraph of `told_apart`.
    """
    scores = {
        evaluation.name: score(evaluation.predictions, questions, params) | outcomes(evaluation.trajectories)
        for evaluation in evaluations
    }
    baselines = {name: row[SUCCESS] for name, row in scores.items() if name not in curves}
    best = max(curves or scores, key=lambda name: scores[name][SUCCESS])
    final = {name: comparison.interval_of(row, SUCCESS) for name, row in scores.items()}
    word = words_of(questions).right
    learning_curves(folder / CURVES_PNG, curves, baselines, word)
    answered = comparison.decoding(evaluations[0].hashes)
    final_scores(folder / FINAL_PNG, final, list(curves), {}, (word, answered))
    write_page(
        folder,
        [
            "# Report",
            f"{len(scores)} agents, {scores[best]['questions']:.0f} test questions, {answered}. Brackets are 95 % "
            f"intervals over questions. Highest {word}: `{best}`, {_cell(scores[best], SUCCESS)}."
            + (NO_BOUND if baselines.get("gold_passages", 1.0) < scores[best][SUCCESS] else ""),
            plan,
            *comparison.warning(evaluations),
            *comparison.above_chance(final),
            f"![{word.capitalize()} on the test questions, per agent]({FINAL_PNG})",
            *_tables(scores, questions),
            *budgets({run: [curve] for run, curve in curves.items()}, final, word),
            f"## {word.capitalize()}, difference on the same questions",
            *_differences(evaluations, [*list(curves)[:1], *list(baselines)[:1]], params),
            "## Learning curves",
            f"![{word.capitalize()} per iteration]({CURVES_PNG})",
            *examples(
                {evaluation.name: evaluation.trajectories for evaluation in evaluations},
                list(curves),
                questions,
                decode,
            ),
        ],
    )
    return final


def budgets(curves: Mapping[str, Sequence[Curve]], scores: Mapping[str, Interval], word: str) -> list[str]:
    """A section with the amounts that runs took, means of their seeds, beside their scores."""
    rows = [
        [
            *(f"`{run}`", f"{scores[run].mean:.3f}", *(f"{taken(seeds, of):,.0f}" for of in BUDGETS)),
            *(f"{gained(seeds, share):,.0f}" for share in GAINED.values()),
        ]
        for run, seeds in curves.items()
    ]
    table = comparison.markdown_table(["run", word, *(words for words, _ in BUDGETS.values()), *GAINED], rows)
    return ["## Budgets", ABOUT_BUDGETS, table.replace("nan", ABSENT)]


def write_page(folder: Path, parts: Sequence[str]) -> None:
    write_text(folder / "report.md", "\n\n".join([*parts, f"[Costs]({COSTS})"]) + "\n")


def add_notes(folder: Path, about: str, notes: Sequence[str]) -> None:
    """Adds notes `about` something to the page, if there are any."""
    if notes:
        page = folder / "report.md"
        write_text(page, f"{page.read_text()}\n{about}: {in_markdown('; '.join(notes))}.\n")


def write_costs(
    folder: Path,
    folders: Mapping[str, Sequence[tuple[Path, Path]]],
    scores: Mapping[str, Interval],
    price: float,
    machines: Sequence[str] = (),
) -> None:
    """Writes costs.md, by the `folders` of every run's trainings and evaluations, with the `price` of a device-hour.

    `machines` trained the runs. Their kernels decide the last bits, and so the digits.
    """
    base = scores.get(BASE_TOOL_CALL)
    columns = list[Sequence[str]]([COST_ROWS])
    for run, seeds in folders.items():
        points = 100 * (scores[run].mean - base.mean) if base else 0.0
        columns.append(_cost_column(_mean_costs(seeds), price, points))
    table = comparison.markdown_table(["", *(f"`{run}`" for run in folders)], [*zip(*columns, strict=True)])
    trained = f"\nTrained on {in_markdown('; '.join(machines))}.\n" if machines else ""
    write_text(folder / COSTS, f"# Costs\n\n{ABOUT_COSTS}\n\n{table}\n{trained}")


def _cost_column(costs: Mapping[str, float], price: float, points: float) -> list[str]:
    """A run's costs, in the order of `COST_ROWS`; `points` are the percentage points that it gained."""
    pairs = [(costs[f"cost/{purpose}_core_s"], costs[f"cost/{purpose}_device_s"]) for purpose in PURPOSES]
    cores, devices = (sum(seconds) for seconds in zip(*pairs, strict=True))
    pairs += [(cores, devices), (costs["cost/evaluation_core_s"], costs["cost/evaluation_device_s"])]
    return [
        *(" / ".join(map(_amount, pair)) for pair in pairs),
        *(_amount(costs[name]) for name in ("cost/sampled_tokens", "update/tokens")),
        _amount(costs["cost/gpu_peak_gib"] or costs["cost/peak_gib"], 1),
        _amount(price * devices / 3600, 2) if price else ABSENT,
        _amount(cores / points) if points > 0 else "none",
    ]


def _mean_costs(seeds: Sequence[tuple[Path, Path]]) -> defaultdict[str, float]:
    """The costs of trainings and evaluations, and the trained tokens, with NaN where a version did not measure."""
    totals = []
    for training, evaluation in seeds:
        rows = read_metrics(training)
        answers = read_metrics(evaluation) if (evaluation / METRICS).exists() else []
        costs = costs_in([*rows, *answers]) if "cost/peak_gib" in rows[0] else {}  # else an older version began
        totals.append(costs | {"update/tokens": sum(row.get("update/tokens", 0.0) for row in rows)})
    names = set.intersection(*map(set, totals))
    return defaultdict(lambda: nan, {name: fmean(total[name] for total in totals) for name in names})


def _amount(value: float, decimals: int = 0) -> str:
    return "unknown" if isnan(value) else f"{value:,.{decimals}f}"


def differences(
    agents: Sequence[str], references: Sequence[str], difference: Callable[[str, str], Interval | None]
) -> list[str]:
    """Two paragraphs: how to read the table below it, which has a row per agent and a column per reference."""
    intervals = [[difference(name, reference) for reference in references] for name in agents]
    rows = [
        [f"`{name}`", *(comparison.difference_cell(interval) if interval else ABSENT for interval in row)]
        for name, row in zip(agents, intervals, strict=True)
    ]
    halves = [(interval.high - interval.low) / 2 for row in intervals for interval in row if interval]
    return [
        "The row's agent less the column's, paired by question. **Bold** where the interval leaves out 0; if no two "
        f"agents differed, chance alone would make {len(halves) * (1 - LEVEL):.1f} of these {len(halves)} bold."
        + (f" Half of these intervals reach at most {median(halves):.3f} to either side: {UNSHOWN}." if halves else ""),
        comparison.markdown_table(["agent", *(f"less `{reference}`" for reference in references)], rows),
    ]


def _tables(scores: AgentScores, questions: Sequence[Question]) -> list[str]:
    """All measures by data set and by the first stratum, success by the other strata, then tokens."""

    def by(stratum: str, titles: Mapping[str, str]) -> list[str]:
        return [
            part
            for title, measure in titles.items()
            for part in (title, _table(scores, measure, _strata(scores, stratum)))
        ]

    word = words_of(questions).right.capitalize()
    strata = strata_of(questions)
    first = strata[0] if strata else ""
    answered = any("f1" in row for row in scores.values())
    graded = {f"### {word}": SUCCESS} | ({"### F1": "f1"} if answered else {})
    calls = {"### Tool calls per question" if answered else "### Calls per question": "tool_calls"}
    return [
        *(["## Scores by data set", *by("dataset", graded)] if _strata(scores, "dataset") else []),
        f"## Scores by {STRATA.get(first, first)}" if first else "## Scores",
        *by(first, graded | calls),
        *(part for name in strata[1:] for part in by(name, {f"## {word} by {STRATA.get(name, name)}": SUCCESS})),
        *_passes(scores),
        "## Tokens per question",
        "Sampled tokens are the policy's actions; all others it reads. Each counts once, as with a cache.",
        comparison.markdown_table(
            ["agent", "read", "sampled"],
            [
                [_agent(name, row), _cell(row, "tokens_read", 1), _cell(row, "tokens_sampled", 1)]
                for name, row in scores.items()
            ],
        ),
    ]


def _passes(scores: AgentScores) -> list[str]:
    """The chances that one of k samples is right and that all are; nothing where each question has one answer."""
    names = dict.fromkeys(key for row in scores.values() for key in row if key.startswith("pass_") and "/" not in key)
    titles = [name.replace("pass_at_", "pass@").replace("pass_hat_", "pass^") for name in names]
    rows = [[_agent(name, row), *(_cell(row, key) for key in names)] for name, row in scores.items()]
    legend = "pass@k: one of k samples is right. pass^k: all of them are."
    return ["## Several samples", legend, comparison.markdown_table(["agent", *titles], rows)] if names else []


def strata_of(questions: Sequence[Question]) -> list[str]:
    """The names of the questions' strata, such as hops and kind."""
    return list(dict.fromkeys(name for question in questions for name in question.strata))


def _strata(scores: AgentScores, name: str) -> list[str]:
    """The values of a stratum in order. A single data set is none."""
    start = f"questions/{name}_"
    values = {key.split("/")[1] for row in scores.values() for key in row if name and key.startswith(start)}
    return sorted(values, key=in_order)


def in_order(stratum: str) -> tuple[int, str]:
    """A sort key: numbers by size, other strata by letters."""
    number = re.match(r"\w*?_(\d+)", stratum)
    return (int(number[1]) if number else 0, stratum)


def stratum_title(stratum: str) -> str:
    name, _, value = stratum.partition("_")
    return in_markdown(value) if name != "hops" else f"{value} hop" if value == "1" else f"{value} hops"


def _table(scores: AgentScores, measure: str, strata: Sequence[str]) -> str:
    beside = [GREEDILY] * (measure == SUCCESS and any(GREEDILY in row for row in scores.values()))
    keys = [measure, *beside, *(f"{measure}/{stratum}" for stratum in strata)]
    rows = [[_agent(name, row), *(_cell(row, key) for key in keys)] for name, row in scores.items()]
    return comparison.markdown_table(["agent", "all", *beside, *map(stratum_title, strata)], rows)


def _agent(name: str, row: Mapping[str, float]) -> str:
    """An agent's name, with the number of its aborted episodes if there are any."""
    aborted = f" (aborted: {row['aborted']:.0f} of {row['aborted'] + row['questions']:.0f})" if row["aborted"] else ""
    return f"`{name}`{aborted}"


def _cell(scores: Mapping[str, float], key: str, decimals: int = 3) -> str:
    return comparison.mean_cell(comparison.interval_of(scores, key), decimals) if key in scores else ABSENT


def _differences(evaluations: Sequence[Evaluation], references: Sequence[str], params: EvaluateParams) -> list[str]:
    by_name = {evaluation.name: evaluation for evaluation in evaluations}

    def difference(name: str, reference: str) -> Interval | None:
        if name == reference or by_name[name].asked != by_name[reference].asked:
            return None
        values = comparison.paired(by_name[name], by_name[reference])
        return paired_difference(*values, params.bootstrap_samples, params.seed)

    return differences(list(by_name), references, difference)


def write_scores(folder: Path, scores: Mapping[str, Interval]) -> None:
    """Writes a file per agent with its success. DVC sorts the columns, so the bounds are named around it."""
    with replaced_folder(folder) as fresh:
        for name, score in scores.items():
            row = {"lower": score.low, SUCCESS: score.mean, "upper": score.high}
            rounded = {key: round(value, DECIMALS) for key, value in row.items()}
            write_json(fresh / f"{name}.json", rounded)


def write_curves(folder: Path, curves: Mapping[str, Sequence[Curve]]) -> None:
    """Writes a file per metric of `DRAWN`: by iteration the mean of each run's seeds, null unless all have one."""
    with replaced_folder(folder) as fresh:
        for name, metric in DRAWN.items():
            means = {run: _means(seeds, metric) for run, seeds in curves.items()}
            iterations = sorted(set[int]().union(*means.values()))
            rows = [
                {"iteration": iteration} | {run: mean.get(iteration) for run, mean in means.items()}
                for iteration in iterations
            ]
            write_text(fresh / f"{name}.json", "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def _means(seeds: Sequence[Curve], metric: str) -> dict[int, float]:
    """The mean of the seeds by iteration, if all have a value."""
    values = defaultdict[int, list[float]](list)
    for row in (row for rows in seeds for row in rows if metric in row):
        values[int(row["iteration"])].append(row[metric])
    return {iteration: round(sum(of) / len(of), DECIMALS) for iteration, of in values.items() if len(of) == len(seeds)}
