"""Recipes: curves of several seeds make a band, which says whether a run is inside, above, below or collapsed.

A curve is a table with a row per iteration: metrics, and facts that identify the training. A run's is a JSON that can
be sent to somebody else, and those of several seeds are the CSV of a recipe. S = seeds, T = iterations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd

from agent_r1.evaluation.plots import SAMPLED
from agent_r1.evaluation.statistics import ROUNDING, prediction
from agent_r1.files import model_hash, read_metrics, sha256, write_text
from agent_r1.identity import read_start
from agent_r1.inspection.stored import StoredRun
from agent_r1.params import fingerprint
from agent_r1.records import Floats
from agent_r1.surroundings import machine

COMPARED = ["model", "data", "prompt"]
FACTS = ["seed", *COMPARED, "settings", "hardware"]
SIGNS = {"rollout/action_tokens", "outcome/malformed", "rollout/surprisal"}  # of a collapse, beside a lost score
ALARMS = "monitor/alarms"
MISMATCH = "policy/mismatch_kl"  # of an update: an iteration that learns nothing has none
METRICS = [SAMPLED, "reward/total", "rollout/steps", *sorted(SIGNS), MISMATCH, ALARMS]
STREAK = 3  # iterations in a row on one side of the band, with which a run has left it
LEFT = [["above"] * STREAK, ["below"] * STREAK]
LARGEST = 1 << 20  # bytes of a file
PLAIN = re.compile("[ -~]{1,200}")


def curve_of(folder: Path) -> pd.DataFrame:
    """The curve of a training of this machine, as far as it is. Raises ValueError, and OSError without its model.

    The model is that of `model.path`. The built-in one is told by tokenizer and size: its weights differ by machine.
    """
    stored = StoredRun(folder.name, folder, folder)
    start = read_start(folder)
    if start is None:
        raise ValueError(f"{folder} has no start.json, as of an older version; train it again")
    path = start.parameters["model.path"]
    policy = stored.policy_folder
    built_in = fingerprint(sha256(policy / "tokenizer.json"), (policy / "model.safetensors").stat().st_size)
    settings = {name: value for name, value in start.parameters.items() if name.startswith("train.")}
    rows = [{MISMATCH: 0.0} | row for row in read_metrics(folder)[: stored.progress.iterations]]
    return pd.DataFrame(rows)[["iteration", *METRICS]].assign(
        seed=str(settings.pop("train.seed")),
        model=model_hash(path) if path else built_in,
        data=fingerprint(start.inputs["questions"], start.inputs["passages"]),
        prompt=start.inputs["prompt"],
        settings=fingerprint(settings),
        hardware=machine(),
    )


def read_curves(path: Path) -> pd.DataFrame:
    """The curves in a JSON or CSV of anybody's. A ValueError names its fault."""
    read = pd.read_json if path.suffix == ".json" else pd.read_csv
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        curves = read(path, dtype=dict.fromkeys(FACTS, str))[[*FACTS, "iteration", *METRICS]]
        if not curves[FACTS].map(lambda fact: bool(PLAIN.fullmatch(fact))).all(axis=None):
            raise ValueError(f"{', '.join(FACTS)} are texts of 1 to 200 plain characters")
        _by_seed(curves, SAMPLED)
    except (ValueError, KeyError, TypeError) as fault:
        raise ValueError(f"{path} is no file of `agent-r1 recipe`: {fault}; have it made again") from fault
    return curves


def write_band(path: Path, curves: Sequence[pd.DataFrame]) -> None:
    """Writes the band of seeds' curves, up to the end of the shortest.

    Raises ValueError for less than three seeds, and where there is a band of this name.
    """
    if path.exists():
        raise ValueError(f"{path} exists, and no band is replaced; move it away, or give another --recipe")
    band = pd.concat([curve.head(min(map(len, curves))) for curve in curves])
    prediction(_by_seed(band, SAMPLED))
    write_text(path, band.to_csv(index=False))


def check(run: pd.DataFrame, band: pd.DataFrame) -> tuple[str, dict[str, Floats]]:
    """Holds a run against a band, over the iterations that both have.

    A run has left the band where a metric is on one side of the interval of 95 % of new seeds for STREAK iterations in
    a row, and it ends inside, above or below by its success. It has collapsed if its last successes are lower than its
    first, and its monitor raised an alarm or it ends below and outside by one of the SIGNS. A good run may have alarms.

    Returns the verdict, which begins with one of these words, and by metric [4, T] the run and the band's low, mean and
    high. Raises ValueError for another model, data or prompt.
    """
    for name in COMPARED:
        expected, *others = pd.concat([band, run])[name].unique()
        if others:
            raise ValueError(f"not compared: {name} is {others[-1]}, the recipe's {expected}; choose another --recipe")
    length = min(curves["iteration"].nunique() for curves in (run, band))
    panels = {metric: _panel(run, band, metric, length) for metric in METRICS}
    events = [*_events(panels)]
    if {*run["settings"]} - {*band["settings"]}:
        events.append("its settings are others")
    return "; ".join([f"{_state(panels)} after {length} iterations", *events]), panels


def _events(panels: Mapping[str, Floats]) -> Iterator[str]:
    """Where each metric left the band first, and the first alarm."""
    for metric, panel in panels.items():
        for start, side in islice(_departures(panel).items(), 1):
            yield f"{metric} left {side} in iteration {start}"
    for place in np.flatnonzero(panels[ALARMS][0])[:1]:
        yield f"first alarm in iteration {place}"


def _panel(run: pd.DataFrame, band: pd.DataFrame, metric: str, length: int) -> Floats:
    """[4, T] a metric of the run's first `length` iterations, and the band's low, mean and high."""
    [values] = _by_seed(run, metric)[:, :length]
    return np.stack([values, *prediction(_by_seed(band, metric))[:, :length]])


def _departures(panel: Floats) -> dict[int, str]:
    """Where a run is on one side of a band [4, T] for STREAK iterations in a row: first iteration -> side."""
    values, low, _, high = panel
    sides = np.select([values > high + ROUNDING, values < low - ROUNDING], ["above", "below"], "inside").tolist()
    return {start: side for start, side in enumerate(sides) if sides[start : start + STREAK] in LEFT}


def _state(panels: Mapping[str, Floats]) -> str:
    """How a run ends, by its success, the sides on which its metrics end, and its alarms."""
    success = panels[SAMPLED][0]
    departures = {metric: _departures(panel) for metric, panel in panels.items()}
    ends = {
        metric: sides[len(success) - STREAK] for metric, sides in departures.items() if len(success) - STREAK in sides
    }
    state = ends.get(SAMPLED, "inside")
    lost = success[-STREAK:].mean() < success[:STREAK].mean()
    collapsed = lost and (panels[ALARMS][0].any() or (state == "below" and SIGNS & ends.keys()))
    return "collapsed" if collapsed else state


def _by_seed(curves: pd.DataFrame, metric: str) -> Floats:
    """A metric of curves [S, T]. A ValueError names an iteration that is missing, or has no number."""
    table = curves.pivot(index="seed", columns="iteration", values=metric)
    values = table.reindex(columns=range(table.shape[1])).to_numpy(np.float64)
    for row, iteration in np.argwhere(~np.isfinite(values)):
        raise ValueError(f"seed {table.index[row]} has no {metric} in iteration {iteration}; have the file made again")
    return values
