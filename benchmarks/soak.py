"""Whether a long training grows: `python -m benchmarks.soak [--iterations 400] [--agent] [--store]`, from the root.

Trains `grpo` in a small graph with vLLM, as one types it, or with an agent outside, and looks once a second at the
training's processes and files. Prints, for each measure, its means over the first 50 iterations after the 50th and over
the last 50, and its slope between. The rows of the episodes are kept by intent, and are counted apart.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import yaml

from agent_r1.files import METRICS
from agent_r1.params import load
from agent_r1.params.places import PARAMS, RunId
from benchmarks.agents import WAYS
from benchmarks.kills import SMALL, environment, make_small, repro
from benchmarks.reruns import copy_project
from benchmarks.stored import Row, options, show

RUN, SETTLED, WINDOW, EVERY_S = "soaked", 50, 50, 1.0
# The engine uses one page of its cache after the other: a small cache has none left to begin long before SETTLED.
SMALL_CACHE = "engine: {vllm: {cpu_cache_gib: 0.05}}"
MIB = 2**20
OWN, STARTED = "memory of the training, MiB", "memory of what it started, MiB"
LOG, ROWS, OTHER_FILES = "log, kB", "rows of episodes, MiB", "all other files, MiB"
Look = dict[str, float]  # measure -> value
Looks = dict[int, list[Look]]  # finished iterations -> what was seen meanwhile


def lay_out(folder: Path, iterations: int, agent: bool) -> None:
    """A small graph up to its warm start, with a run of so many iterations."""
    copy_project(folder)
    make_small(folder, SMALL + SMALL_CACHE)
    content = yaml.safe_load((folder / PARAMS).read_text())
    run = {"iterations": iterations, "rollout": {"questions": 4, "samples": 4}, "credit": {"estimator": "grpo"}}
    content["runs"][RUN] = run | {"checkpoint": {"every": 10}}
    if agent:
        function, more = WAYS["bare"]
        content["env"]["agents"] = {"bare": {"function": f"benchmarks.asking:{function}", "timeout_s": 600, **more}}
        content["runs"][RUN]["env"] = {"agent": "bare", "order": "arrival"}
    (folder / PARAMS).write_text(yaml.safe_dump(content, sort_keys=False))
    if repro(folder, "warm_start").wait():
        raise SystemExit((folder / "log").read_text()[-2000:])


def of_processes(training: psutil.Process) -> Look:
    """Of the training and all that it started."""
    look: Look = dict.fromkeys((OWN, STARTED, "open files", "threads", "processes"), 0.0)
    for process in (training, *training.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            look[OWN if process == training else STARTED] += process.memory_full_info().uss / MIB
            look["open files"] += process.num_fds()
            look["threads"] += process.num_threads()
            look["processes"] += 1
    return look


def of_files(folder: Path, run: Path) -> Look:
    """Of all that lies in the project."""
    look: Look = dict.fromkeys((LOG, ROWS, OTHER_FILES), 0.0)
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            size = 0 if path.is_symlink() or not path.is_file() else path.stat().st_size
            if path.name == "log":
                look[LOG] += size / 1000
            else:
                look[ROWS if run in path.parents and path.suffix == ".parquet" else OTHER_FILES] += size / MIB
    return look


def watch(folder: Path) -> Iterator[tuple[int, Look]]:
    """Starts the training; yields finished iterations and a look at it, until it ends; a failure is a SystemExit."""
    run = folder / load(folder / PARAMS).places.training(RunId(RUN))
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "flows", "train", "--run", RUN]
        training = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=log, stderr=log)
    while training.poll() is None:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            finished = len((run / METRICS).read_text().splitlines())
            yield finished, of_processes(psutil.Process(training.pid)) | of_files(folder, run)
        time.sleep(EVERY_S)
    if training.returncode:
        raise SystemExit((folder / "log").read_text()[-2000:])


def growth(looks: Looks, measure: str, iterations: int) -> Row:
    """The measure after it has settled, at the end, and its slope with the interval of least squares."""
    means = {at: float(np.mean([look[measure] for look in seen])) for at, seen in looks.items()}
    line = {at: mean for at, mean in means.items() if SETTLED <= at < iterations}  # the last one ends the training
    (slope, _), covariance = np.polyfit(list(line), list(line.values()), 1, cov=True)
    first = [mean for at, mean in line.items() if at < SETTLED + WINDOW]
    last = [mean for at, mean in line.items() if at >= iterations - WINDOW]
    return {
        "measure": measure,
        f"iterations {SETTLED} to {SETTLED + WINDOW}": f"{np.mean(first):.1f}",
        f"{iterations - WINDOW} to {iterations}": f"{np.mean(last):.1f}",
        "most": f"{max(line.values()):.1f}",
        "in 100 iterations": f"{100 * slope:+.2f} ±{196 * covariance[0, 0] ** 0.5:.2f}",
    }


def soak(iterations: int, agent: bool) -> list[Row]:
    looks: Looks = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lay_out(folder, iterations, agent)
        for finished, look in watch(folder):
            looks[finished].append(look)
    loop = {"loop": "an agent outside" if agent else "built in"}
    return [loop | growth(looks, measure, iterations) for measure in look]


def main() -> None:
    parser = options("Looks whether a long training grows.")
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--agent", action="store_true", help="with an agent outside")
    choice = parser.parse_args()
    show("soak", soak(choice.iterations, choice.agent), store=choice.store, keys=2)


if __name__ == "__main__":
    main()
