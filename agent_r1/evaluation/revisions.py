"""What two revisions of the project are compared by: final scores and learning curves, as small files for git.

DVC reads them: `dvc metrics show`, `dvc metrics diff`, `dvc plots show`, `dvc plots diff`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_r1.evaluation.plots import SAMPLED, Curve
from agent_r1.evaluation.scores import SUCCESS
from agent_r1.evaluation.statistics import Interval
from agent_r1.files import replaced_folder, write_text

DRAWN = {SUCCESS: SAMPLED, "reward": "reward/total"}  # file -> metric
DECIMALS = 4


def write_scores(folder: Path, scores: Mapping[str, Interval]) -> None:
    """Writes a file for each agent: its success between the bounds of the interval, as DVC sorts the columns."""
    with replaced_folder(folder) as fresh:
        for name, found in scores.items():
            row = {"lower": found.low, SUCCESS: found.mean, "upper": found.high}
            rounded = {key: round(value, DECIMALS) for key, value in row.items()}
            write_text(fresh / f"{name}.json", json.dumps(rounded, indent=2) + "\n")


def write_curves(folder: Path, curves: Mapping[str, Sequence[Curve]]) -> None:
    """Writes a file for each of `DRAWN`: a row per iteration, and in it the mean of each run's seeds.

    A run that has no value of all its seeds at an iteration has null there.
    """
    with replaced_folder(folder) as fresh:
        for name, metric in DRAWN.items():
            means = {run: _means(seeds, metric) for run, seeds in curves.items()}
            iterations = sorted(set[int]().union(*means.values()))
            rows = [{"iteration": each} | {run: found.get(each) for run, found in means.items()} for each in iterations]
            write_text(fresh / f"{name}.json", "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def _means(seeds: Sequence[Curve], metric: str) -> dict[int, float]:
    """The mean of the seeds by iteration, where all have one."""
    values = defaultdict[int, list[float]](list)
    for rows in seeds:
        for row in rows:
            if metric in row:
                values[int(row["iteration"])].append(row[metric])
    return {each: round(sum(of) / len(of), DECIMALS) for each, of in values.items() if len(of) == len(seeds)}
