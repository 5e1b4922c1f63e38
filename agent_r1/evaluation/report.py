"""The report: one Markdown page, two pictures and `metrics.json`, from what `evaluate` and `train` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_r1.evaluation import comparison
from agent_r1.evaluation.comparison import Evaluation, warning
from agent_r1.evaluation.plots import Curves, final_scores, learning_curves
from agent_r1.evaluation.predictions import BASE_TOOL_CALL
from agent_r1.evaluation.scores import score
from agent_r1.evaluation.statistics import Interval, paired_difference
from agent_r1.evaluation.transcript import Decode, examples
from agent_r1.files import write_text
from agent_r1.records import Question

CURVES_PNG, FINAL_PNG, PAGE, METRICS = "learning_curves.png", "final_scores.png", "report.md", "metrics.json"
REFERENCES = ("ppo", BASE_TOOL_CALL)  # every other agent is compared with these
ABSENT = "n/a"
TOKENS = ("read", "sampled")

Scores = Mapping[str, Mapping[str, float]]  # agent -> what `score` makes of its predictions


def render(
    evaluations: Sequence[Evaluation],
    curves: Curves,
    questions: Sequence[Question],
    decode: Decode,
    folder: Path,
    *,
    samples: int,
    seed: int,
) -> None:
    """Writes report.md, learning_curves.png, final_scores.png and metrics.json into `folder`.

    The agents in `curves` are the trained runs, the others baselines; both keep their order. `samples` and `seed` are
    those of the bootstrap.
    """
    scores = {e.name: score(e.predictions, questions, samples, seed) for e in evaluations}
    learning_curves(folder / CURVES_PNG, curves, {name: s["em"] for name, s in scores.items() if name not in curves})
    final_scores(folder / FINAL_PNG, {name: _interval(s, "em") for name, s in scores.items()}, list(curves), seeds={})
    page = "\n\n".join(
        [
            "# Report",
            _summary(scores, list(curves) or list(scores)),
            *warning(evaluations),
            f"![Exact match on the test questions, per agent]({FINAL_PNG})",
            *_tables(scores),
            *_differences(evaluations, samples, seed),
            "## Learning curves",
            f"![Exact match and reward per iteration]({CURVES_PNG})",
            *examples({e.name: e.trajectories for e in evaluations}, list(curves), questions, decode),
        ]
    )
    write_text(folder / PAGE, page + "\n")
    write_text(folder / METRICS, json.dumps({name: round(s["em"], 4) for name, s in scores.items()}, indent=2) + "\n")


def _summary(scores: Scores, trained: Sequence[str]) -> str:
    best = max(trained, key=lambda name: scores[name]["em"])
    return (
        f"{len(scores)} agents, {scores[best]['questions']:.0f} test questions, greedy decoding. Brackets are 95 % "
        f"bootstrap intervals over questions. Highest exact match: `{best}`, {_cell(scores[best], 'em')}."
    )


def _tables(scores: Scores) -> list[str]:
    hops, kinds = _strata(scores, "hops_"), _strata(scores, "kind_")
    return [
        *_dataset_tables(scores),
        "## Scores by number of hops",
        "### Exact match",
        _table(scores, "em", hops),
        "### F1",
        _table(scores, "f1", hops),
        "### Tool calls per question",
        _table(scores, "tool_calls", hops),
        "## Exact match by kind of question",
        _table(scores, "em", kinds),
        "## Tokens per question",
        "Sampled tokens are the policy's actions; all others it reads. Each counts once, as with a cache.",
        _tokens(scores),
    ]


def _dataset_tables(scores: Scores) -> list[str]:
    """Nothing where there is one data set."""
    datasets = _strata(scores, "dataset_")
    if not datasets:
        return []
    return [
        "## Scores by data set",
        *("### Exact match", _table(scores, "em", datasets)),
        *("### F1", _table(scores, "f1", datasets)),
    ]


def _strata(scores: Scores, prefix: str) -> list[str]:
    found = {key.split("/")[1] for row in scores.values() for key in row if key.startswith(f"questions/{prefix}")}
    return sorted(found, key=lambda stratum: (len(stratum), stratum) if prefix == "hops_" else (0, stratum))


def _table(scores: Scores, measure: str, strata: Sequence[str]) -> str:
    keys = [measure, *(f"{measure}/{stratum}" for stratum in strata)]
    rows = [[f"`{name}`", *(_cell(row, key) for key in keys)] for name, row in scores.items()]
    return comparison.table(["agent", "all", *map(_stratum_title, strata)], rows)


def _tokens(scores: Scores) -> str:
    rows = [[f"`{name}`", *(_cell(row, f"tokens_{kind}", 1) for kind in TOKENS)] for name, row in scores.items()]
    return comparison.table(["agent", *TOKENS], rows)


def _stratum_title(stratum: str) -> str:
    what, _, value = stratum.partition("_")
    return value if what != "hops" else f"{value} hop" if value == "1" else f"{value} hops"


def _differences(evaluations: Sequence[Evaluation], samples: int, seed: int) -> list[str]:
    references = [e for name in REFERENCES for e in evaluations if e.name == name]
    if not references:
        return []
    rows = [[f"`{e.name}`", *(_difference(e, other, samples, seed) for other in references)] for e in evaluations]
    return [
        "## Exact match, difference on the same questions",
        "The row's agent less the column's, paired by question. **Bold** where the interval leaves out 0.",
        comparison.table(["agent", *(f"less `{e.name}`" for e in references)], rows),
    ]


def _difference(evaluation: Evaluation, other: Evaluation, samples: int, seed: int) -> str:
    if evaluation is other or evaluation.asked != other.asked:
        return ABSENT
    ours, theirs = ({p.question_id: p.em for p in e.predictions} for e in (evaluation, other))
    values = list(ours.values()), [theirs[question] for question in ours]
    return comparison.difference(paired_difference(*values, samples, seed))


def _interval(scores: Mapping[str, float], key: str) -> Interval:
    return Interval(mean=scores[key], low=scores[f"{key}/low"], high=scores[f"{key}/high"])


def _cell(scores: Mapping[str, float], key: str, decimals: int = 3) -> str:
    return comparison.mean(_interval(scores, key), decimals) if key in scores else ABSENT
