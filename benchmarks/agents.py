"""Agents outside beside the built-in loop: `python -m benchmarks.agents --into FOLDER [--seeds 0 1 2] [--store]`.

Trains `grpo` for 12 iterations, or as many as `--iterations` says, with the built-in loop, with an agent over bare HTTP
and with one that has the official client, all asked by arrival, and for one iteration with agents that keep their
history in other ways. What is there already is not made again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import yaml
from scipy.stats import t

from agent_r1.evaluation.statistics import LEVEL
from agent_r1.files import read_metrics
from agent_r1.params import Params
from agent_r1.params.places import PARAMS, RunId
from benchmarks.curve import SAMPLES, open_project, sampled, train_lacking
from benchmarks.reruns import copy_project
from benchmarks.stored import ROOT, Row, options, show

OWN = "built_in"
LEARNED = (OWN, "bare", "official")
# Run -> function of `benchmarks.asking`, and what its declaration adds.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "bare": ("bare", {}),
    "official": ("official", {}),
    "forgetful": ("forgetful", {}),
    "forgetful_sent": ("forgetful", {"history": "sent"}),
    "brief": ("brief", {}),
    "twofold": ("twofold", {"parallel": True}),
}
SHOWN = ("agent/requests", "agent/contexts", "agent/reread_tokens", "agent/kept_share", "rollout/tokens")


def declare(path: Path, iterations: int) -> None:
    """Has a project's parameters name the agents, and a run of each."""
    content = yaml.safe_load(path.read_text())
    module, steps = "benchmarks.asking", content["env"]["max_steps"]
    content["env"]["agents"] = {
        name: {"function": f"{module}:{function}", "timeout_s": 600, **more} for name, (function, more) in WAYS.items()
    }
    validation = {"every": iterations, "questions": 0, "samples": SAMPLES}
    runs = {name: {"order": "arrival"} | ({} if name == OWN else {"agent": name}) for name in (OWN, *WAYS)}
    runs["twofold"]["max_steps"] = 2 * steps
    content["runs"] |= {
        name: content["runs"]["grpo"] | {"iterations": iterations, "validation": validation, "env": env}
        if name in LEARNED
        else content["runs"]["grpo"] | {"iterations": 1, "env": env}
        for name, env in runs.items()
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def cell(values: Sequence[float], decimals: int = 3, sign: str = "") -> str:
    """A mean with its interval by Student's t, or a single value."""
    mean = f"{fmean(values):{sign}.{decimals}f}"
    if len(values) == 1:
        return mean
    half = t.ppf((1 + LEVEL) / 2, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean} [{fmean(values) - half:{sign}.{decimals}f}, {fmean(values) + half:{sign}.{decimals}f}]"


def spent(folder: Path) -> list[float]:
    """The core-seconds of each iteration of a run but the first, and the last one, which validates, too."""
    rows = read_metrics(folder)[:-1]
    totals = [sum(seconds for metric, seconds in row.items() if metric.endswith("_core_s")) for row in rows]
    return [later - earlier for earlier, later in pairwise(totals)]


def cost(settings: Params, run: str, seeds: Sequence[int]) -> Row:
    """What a run's iterations take, beside those of the built-in loop with the same numbers."""
    pairs = list[tuple[float, float]]()
    for seed in seeds:
        pairs += zip(*(spent(settings.places.training(RunId(name, seed))) for name in (run, OWN)), strict=False)
    return {
        "run": run,
        "pairs": str(len(pairs)),
        "core-seconds of an iteration": f"{np.median([mine for mine, _ in pairs]):.1f}",
        "of the built-in loop's": cell([mine / own for mine, own in pairs], 2),
    }


def learned(settings: Params, run: str, seeds: Sequence[int]) -> Row:
    """A run's end, and the time that an iteration takes, beside the built-in loop's of the same seed and number."""

    def of(name: str) -> tuple[list[float], list[float], list[float]]:
        ends, cores, seconds = [], [], []
        for seed in seeds:
            folder = settings.places.training(RunId(name, seed))
            ends.append(sampled(folder)[-1][1])
            rows = read_metrics(folder)
            cores += spent(folder)
            seconds += [row["time/rollout_s"] + row["time/credit_s"] + row["time/update_s"] for row in rows[1:-1]]
        return ends, cores, seconds

    mine, own = of(run), of(OWN)
    less = [one - other for one, other in zip(mine[0], own[0], strict=True)]
    ratios = [
        [one / other for one, other in zip(these, those, strict=True)]
        for these, those in zip(mine[1:], own[1:], strict=True)
    ]
    apart = [""] * 3 if run == OWN else [cell(less, sign="+"), *(cell(each, 2) for each in ratios)]
    return {
        "run": run,
        "success": f"{fmean(mine[0]):.3f}",
        "by seed": ", ".join(f"{each:.3f}" for each in mine[0]),
        "less the built-in loop": apart[0],
        "core-seconds of an iteration": f"{np.median(mine[1]):.1f}",
        "of the built-in loop's": apart[1],
        "seconds": f"{np.median(mine[2]):.1f}",
        "of its seconds": apart[2],
    }


def kept(settings: Params, run: str, seed: int) -> Row:
    """The tokens that the first iteration reads, and how many of them as sampled."""
    first = read_metrics(settings.places.training(RunId(run, seed)))[0]
    return {"run": run, **{name: f"{first[name]:.2f}" if name in first else "n/a" for name in SHOWN}}


def main() -> None:
    parser = options("Trains agents outside beside the built-in loop.")
    parser.add_argument("--into", type=Path, required=True, help="the folder of the trainings")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--costs", action="store_true", help="only say what the iterations took that are there")
    given = parser.parse_args()
    if not given.into.exists():
        copy_project(given.into)
        declare(given.into / PARAMS, given.iterations)
    settings = open_project(given.into)
    if given.costs:
        costs = [cost(settings, run, given.seeds) for run in LEARNED]
        os.chdir(ROOT)
        show("agent_costs", costs, store=given.store)
        return
    long = [RunId(run, seed) for seed in given.seeds for run in LEARNED]
    short = [RunId(run, given.seeds[0]) for run in WAYS if run not in LEARNED]
    train_lacking(settings, [*long, *short])
    found = [learned(settings, run, given.seeds) for run in LEARNED]
    ways = [kept(settings, run, given.seeds[0]) for run in WAYS]
    os.chdir(ROOT)
    show("agents", found, store=given.store)
    show("histories", ways, store=given.store)


if __name__ == "__main__":
    main()
