"""Ends `dvc repro` of a small graph at random moments: `python -m benchmarks.kills [--ranks N]`, from the root.

What was ended is started again, by the same command, until a run comes to its end by itself. Then the outputs have the
bits of a graph that was left alone, nothing runs any more, and the temporary folder is as empty as after that one.
Prints a line per end, and exits with 1 if anything differed. With `--ranks` so many processes share the learner of a
training, and one of them at a time is killed, from the end of the warm start to that of the training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from benchmarks.reruns import copy_project

SMALL = """
prepare: {atlas: {people: 40, films: 20, companies: 10, cities: 10, countries: 4,
  train_questions: 60, dev_questions: 12, test_questions: 24}}
model: {threads: 1}
warm_start: {vocab_size: 640, hidden_size: 64, layers: 2, heads: 2, demonstrations: 400, naive_rag_demonstrations: 40,
  batch_size: 16, steps: 100, learning_rate: 0.003}
env: {top_k: 2, max_steps: 4, max_tokens: 448, max_action_tokens: 64}
train: {iterations: 3, checkpoint: {every: 3}, rollout: {questions: 8},
  update: {minibatches: 2, critic: {warmup: {iterations: 1, explained_variance: 0.0, limit: 0}}}}
evaluate: {questions: 12, bootstrap_samples: 100}
repro_runs: [ppo]
repro_baselines: [base_tool_call]
"""
BITS = ("*.safetensors", "*.parquet", "scores.json")
TIMED = {"trajectories", "trajectories.parquet"}  # whose rows say how long a call took
REPRO = [sys.executable, "-m", "dvc", "repro", "--quiet"]
PATIENCE_S = 60.0  # for what an end leaves running to end too
ATTEMPTS = 3  # that a graph needs at least
DISK_BYTES = (1_000, 5_000_000)  # the largest file that fits on the disk, at least and at most


def lay_out(folder: Path, engine: str, ranks: int) -> None:
    """A copy of the project with small parameters and a temporary folder of its own."""
    copy_project(folder)
    make_small(folder, f"{SMALL}engine: {{kind: {engine}}}\nlearner: {{processes: {ranks}}}\n")


def make_small(folder: Path, parameters: str) -> None:
    (folder / "temporary").mkdir(mode=0o700)
    (folder / "overlays/small.yaml").write_text(parameters)
    overlay = [sys.executable, "-m", "flows", "overlay", "small"]
    subprocess.run(overlay, cwd=folder, env=environment(folder), check=True)


def environment(folder: Path) -> dict[str, str]:
    own = dict.fromkeys(("TMPDIR", "AGENT_R1_LOCKS"), str(folder / "temporary"))
    return {**os.environ, **own, "PYTHONPATH": str(folder), "DVC_NO_ANALYTICS": "1", "DO_NOT_TRACK": "1"}


def bits(folder: Path) -> dict[str, bytes]:
    """What the graph wrote, but for times."""
    places = yaml.safe_load((folder / "params.yaml").read_text())["places"]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for place in (places["data"], places["outputs"])
        for pattern in BITS
        for path in sorted((folder / place).rglob(pattern))
        if not TIMED & set(path.parts) and "aside" not in path.parts
    }


def running(folder: Path) -> list[psutil.Process]:
    """Processes that work in the folder."""
    found = []
    for process in psutil.process_iter(["cwd"]):
        if (process.info["cwd"] or "").startswith(str(folder)) and process.pid != os.getpid():
            found.append(process)
    return found


def to_part(name: str, number: signal.Signals) -> Callable[[subprocess.Popen[bytes]], None]:
    """Signals what DVC started, directly or not, and whose command line holds the name."""

    def end(repro: subprocess.Popen[bytes]) -> None:
        for part in psutil.Process(repro.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any(name in word for word in part.cmdline()):
                    part.send_signal(number)

    return end


def to_group(number: signal.Signals) -> Callable[[subprocess.Popen[bytes]], None]:
    return lambda repro: os.killpg(repro.pid, number)


def to_rank(repro: subprocess.Popen[bytes]) -> None:
    """Kills one of the processes that share the learner."""
    with suppress(psutil.NoSuchProcess):
        parts = psutil.Process(repro.pid).children(recursive=True)
        if ranks := [part for part in parts if "train" in part.cmdline()]:  # a word of its own, but in the shell's
            random.choice(ranks).kill()


FULL, OF_RANKS = "a full disk", "kill -9 of a rank"
ENDS: dict[str, Callable[[subprocess.Popen[bytes]], None]] = {
    "kill -9 of the stage": to_part("flows", signal.SIGKILL),
    "SIGTERM to the stage": to_part("flows", signal.SIGTERM),
    "kill -9 of the engine": to_part("vllm_engine", signal.SIGKILL),
    "SIGINT to the group": to_group(signal.SIGINT),
    "SIGTERM to the group": to_group(signal.SIGTERM),
    "kill -9 of the group": to_group(signal.SIGKILL),
    OF_RANKS: to_rank,
}


def repro(folder: Path, *targets: str, largest_file: int | None = None) -> subprocess.Popen[bytes]:
    """Starts the graph, or what some of its stages take."""

    def limit() -> None:
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [*REPRO, *targets],
            cwd=folder,
            env=environment(folder),
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=limit,
        )


def attempt(folder: Path, targets: Sequence[str], kind: str, moment_s: float, largest_file: int) -> bool:
    """Starts the graph and ends it so; whether it came to its end before. Raises if something goes on running."""
    process = repro(folder, *targets, largest_file=largest_file if kind == FULL else None)
    try:
        done = process.wait(None if kind == FULL else moment_s) == 0
    except subprocess.TimeoutExpired:
        ENDS[kind](process)
        done = process.wait() == 0  # where there was nothing to be ended, it comes to its end
    _, left = psutil.wait_procs(running(folder), PATIENCE_S)
    if left:
        raise RuntimeError(f"after {kind} there run on: {[each.cmdline() for each in left]}")
    return done


def left_alone(folder: Path, *targets: str) -> float:
    """How many seconds the graph takes, or what some of its stages take."""
    started = time.monotonic()
    if repro(folder, *targets).wait():
        sys.exit((folder / "log").read_text())
    return time.monotonic() - started


def kinds_of(engine: str, ranks: int) -> list[str]:
    """How the graph may be ended."""
    if ranks > 1:
        return [OF_RANKS]
    return [kind for kind in (*ENDS, FULL) if kind != OF_RANKS and (engine == "vllm" or "engine" not in kind)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ends", type=int, default=35)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    kinds, ended, wrong = kinds_of(arguments.engine, arguments.ranks), Counter[str](), 0
    targets, attempts = (["train@ppo"], 1) if arguments.ranks > 1 else ([], ATTEMPTS)
    with tempfile.TemporaryDirectory() as scratch:
        ready, alone = Path(scratch) / "ready", Path(scratch) / "alone"
        lay_out(ready, arguments.engine, arguments.ranks)
        if arguments.ranks > 1:
            left_alone(ready, "index", "warm_start")
        shutil.copytree(ready, alone)
        whole_s, expected = left_alone(alone, *targets), bits(alone)
        print(f"left alone: {whole_s:.0f} s, {len(expected)} files", flush=True)
        while ended.total() < arguments.ends:
            folder = Path(scratch) / f"ended_{ended.total()}"
            shutil.copytree(ready, folder)
            done = False
            while not done:
                kind = random.choice(kinds)
                moment_s, largest = random.uniform(1, whole_s / attempts), round(random.uniform(*DISK_BYTES))
                done = attempt(folder, targets, kind, moment_s, largest)
                ended[kind] += not done
                how = f"{largest} bytes" if kind == FULL else f"{moment_s:.0f} s"
                print(f"{kind}, {how}: {'was through' if done else 'ended'}", flush=True)
            found = bits(folder)
            others = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            left = {each.name for each in (folder / "temporary").iterdir()}
            left -= {each.name for each in (alone / "temporary").iterdir()}
            wrong += bool(others or left)
            print(f"other bits: {others or 'none'}; left behind: {sorted(left) or 'nothing'}", flush=True)
            shutil.rmtree(folder)
    print(json.dumps(ended, indent=1), f"wrong: {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
