"""Half widths that `agent-r1 plan` foretells, beside those that came: `python -m benchmarks.foretold`, in minutes.

First those of stored sweeps, each foretold from another one or from other runs, by what their pages in docs/ say. Then
by simulation: a sweep of the answers of `benchmarks.intervals` is the evidence, and another one comes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy.optimize import brentq

from agent_r1.evaluation.statistics import Variances, difference_over_seeds, foretold, half_width, variances
from benchmarks.intervals import LEVEL, OF_QUESTIONS, QUESTIONS, SDS, Values, answers, spread_of
from benchmarks.stored import ROOT, Row, show

EVIDENCE = ((4, 3), (2, 3))  # recipes, and seeds of each
ASKED = 200  # questions of the evidence
SEEDS = (3, 5, 10)
SCORE = re.compile(r"^\| `(\w+)` \| [\d.]+ \[([\d.]+), ([\d.]+)\] \| (\d\.\d+(?: \d\.\d+)+) \|", re.MULTILINE)
# A sweep and the one that foretells it. `ablations` has runs with five seeds and with three.
SWEEPS = {
    "ablations, 5 seeds": "ablations, 3 seeds",
    "arithmetic": "ablations",
    "long_observations": "ablations",
    "frozen_lake": "moves_per_step",
    "sokoban": "frozen_lake",
    "slippery_lake": "frozen_lake",
    "bandit": "frozen_lake",
}


@dataclass(frozen=True, slots=True)
class Page:
    """What a stored page says of a sweep."""

    questions: int
    means: Mapping[str, Sequence[float]]  # by run, success of every seed
    scores: Mapping[str, float]  # by run, the half width of its interval
    differences: Mapping[tuple[str, str], float]  # of two runs

    def parts(self, *runs: str) -> tuple[list[float], list[int]]:
        """The variances of the seeds' means that are in an interval, and their degrees of freedom."""
        seeds = [self.means[run] for run in runs]
        return [float(np.var(of, ddof=1)) / len(of) for of in seeds], [len(of) - 1 for of in seeds]


def page(name: str) -> Page:
    """Reads docs/NAME/report.md; of `NAME, 5 seeds` only the runs that have five, with their differences from any."""
    folder, _, seeds = name.partition(", ")
    text = (ROOT / "docs" / folder / "report.md").read_text()
    means = {run: list(map(float, of.split())) for run, _, _, of in SCORE.findall(text)}
    chosen = [run for run, of in means.items() if not seeds or f"{len(of)} seeds" == seeds]
    table = text.partition("## Differences on the same questions")[2].partition("\n## ")[0]
    columns, halves = re.findall(r"less `(\w+)`", table), {}
    for run in chosen:
        [line] = re.findall(rf"^\| `{run}`(?: \([^)]*\))? \|(.*)\|$", table, re.MULTILINE)
        for column, cell in zip(columns, line.split("|"), strict=True):
            bounds = re.search(r"\[([-+.\d]+), ([-+.\d]+)\]", cell)
            if bounds and column in means and (column, run) not in halves:
                halves[run, column] = (float(bounds[2]) - float(bounds[1])) / 2
    scores = {run: (float(high) - float(low)) / 2 for run, low, high, _ in SCORE.findall(text) if run in chosen}
    return Page(int(re.findall(r"(\d+) test questions", text)[0]), means, scores, halves)


def evidence(found: Page) -> Variances:
    """The variances of a page. A part of the questions that its rounded half widths do not show is 0."""

    def of_questions(half: float, *runs: str) -> float:
        parts, freedom = found.parts(*runs)

        def gap(part: float) -> float:
            return float(half_width(np.array([*parts, part]), [*freedom, found.questions - 1])) - half

        return float(brentq(gap, 0, 1)) * found.questions if gap(0) < 0 else 0.0

    runs = {run: found.means[run] for run in found.scores}
    freedom = [len(of) - 1 for of in runs.values()]
    of_means = float(np.average([np.var(of, ddof=1) for of in runs.values()], weights=freedom))
    questions = fmean(of_questions(half, run) for run, half in found.scores.items())
    noise = max(0.0, fmean(mean * (1 - mean) for of in runs.values() for mean in of) - questions)
    paired = fmean(of_questions(half, *pair) for pair, half in found.differences.items())
    return Variances(max(0.0, of_means - noise / found.questions), sum(freedom), questions, paired, noise, samples=0.0)


def of_sweep(name: str, source: str) -> Row:
    """The differences of a stored sweep's runs, with what another one foretold."""
    came = page(name)
    halves = [half for (_, column), half in came.differences.items() if column in came.scores]
    seeds = len(came.means[next(iter(came.scores))])
    said = foretold(evidence(page(source)), seeds, came.questions, 1, recipes=2)
    within = sum(said.low <= half <= said.high for half in halves)
    return {
        "sweep": name,
        "by the variances of": source,
        "seeds": str(seeds),
        "foretold": f"{said.mean:.3f} [{said.low:.3f}, {said.high:.3f}]",
        "came": f"{fmean(halves):.3f} ({min(halves):.3f} to {max(halves):.3f})",
        "in the range": f"{within} of {len(halves)}",
    }


def simulated(recipes: int, trained: int, sd: float, seeds: int, times: int) -> Row:
    """The mean half widths that sweeps of so many recipes and seeds foretold, and those that came."""
    rng, spread = np.random.default_rng(0), spread_of(sd)

    def sweep(count: int, of_each: int, asked: int) -> list[Values]:
        questions, logits = OF_QUESTIONS * rng.normal(size=asked), LEVEL + spread * rng.normal(size=(count, of_each))
        return [answers(rng, of, questions) for of in logits]

    said, came = [], []
    for _ in range(times):
        found = variances(sweep(recipes, trained, ASKED), samples=1)
        said.append([foretold(found, seeds, QUESTIONS, 1, count) for count in (1, 2)])
        a, b = sweep(2, seeds, QUESTIONS)
        intervals = [difference_over_seeds(a, other, 0, 0) for other in (np.zeros((1, QUESTIONS)), b)]
        came.append([(each.high - each.low) / 2 for each in intervals])
    row = {"evidence": f"{recipes} recipes of {trained} seeds", "sd of seeds": f"{sd:.3f}", "seeds": str(seeds)}
    for place, name in enumerate(("score", "difference")):
        halves = [each[place] for each in came]
        ranges = [each[place] for each in said]
        mean, half = fmean(each.mean for each in ranges), fmean(halves)
        within = fmean(each.low <= one <= each.high for each, one in zip(ranges, halves, strict=True))
        row |= {
            f"{name}, foretold": f"{mean:.3f}",
            f"{name}, came": f"{half:.3f}",
            f"{name}, apart": f"{100 * (mean / half - 1):+.0f} %",
            f"{name}, in the range": f"{100 * within:.0f} %",
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Sets half widths that were foretold beside those that came.")
    parser.add_argument("--times", type=int, default=500, help="simulated sweeps of each kind; 500 by default")
    parser.add_argument("--store", action="store_true", help="in docs/measured")
    chosen = parser.parse_args()
    print(evidence(page("ablations")))
    show("foretold_sweeps", [of_sweep(*names) for names in SWEEPS.items()], store=chosen.store)
    kinds = [(*kind, sd, seeds) for kind in EVIDENCE for sd in SDS for seeds in SEEDS]
    show("foretold", [simulated(*kind, chosen.times) for kind in kinds], store=chosen.store, keys=3)


if __name__ == "__main__":
    main()
