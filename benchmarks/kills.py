"""Ends `dvc repro` of a small graph at random moments: `python -m benchmarks.kills [--ranks N]`, from the root.

What was ended is started again, by the same command, until a run comes to its end by itself. Then the outputs have the
bits of a graph that was left alone, nothing runs any more, and the temporary folder is as empty as after that one.
Prints a line per end, and exits with 1 if anything differed. With `--ranks` so many processes share the learner of a
training, and one of them at a time is killed, from the end of the warm start to that of the training.

With `--injected` no moment is drawn. Each stage is killed before and after each place in the code that writes, renames,
links or removes something, the first, a middle and the last time that it comes there, and is started again. Then all
files are there that a stage left alone has, with the same bits. Prints a line per kill.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

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
train: {iterations: 4, checkpoint: {every: 3}, rollout: {questions: 8},
  update: {minibatches: 2, critic: {warmup: {limit: 3}}}}
evaluate: {questions: 12, bootstrap_samples: 100}
repro_runs: [ppo]
repro_baselines: [base_tool_call]
"""
TINY = """
prepare: {atlas: {people: 20, films: 10, companies: 5, cities: 5, countries: 3,
  train_questions: 40, dev_questions: 4, test_questions: 4}}
model: {threads: 1}
warm_start: {vocab_size: 640, hidden_size: 64, layers: 2, heads: 2, demonstrations: 40, naive_rag_demonstrations: 8,
  batch_size: 8, steps: 9, checkpoint_every: 2}
env: {top_k: 1, max_steps: 2, max_tokens: 448, max_action_tokens: 8}
train: {iterations: 4, checkpoint: {every: 3}, rollout: {questions: 2}, keep: {every: 2},
  validation: {every: 1, questions: 2, keep_best: true},
  update: {minibatches: 2, critic: {minibatches: 2, warmup: {iterations: 0, explained_variance: 0.0, limit: 0}}}}
runs:
  first: {iterations: 1}
  shared: {}
  back: {checkpoint: {every: 1}, validation: {keep_best: false},
    monitor: {on_collapse: rollback, max_rollbacks: 1, patience: 1, thresholds: {grad_norm_spike: 1.01}}}
evaluate: {questions: 4, bootstrap_samples: 100}
repro_runs: [ppo]
repro_baselines: []
"""
INJECTED = {  # the words of each stage, in the order of the graph
    "prepare": ["prepare"],
    "index": ["index"],
    "warm_start": ["warm_start"],
    "store": ["train", "--run", "first"],  # which makes MLflow's
    "train": ["train", "--run", "ppo"],
    "rollback": ["train", "--run", "back"],
    "ranks": ["train", "--run", "shared"],
    "register": ["register", "--run", "ppo"],
    "evaluate": ["evaluate", "--run", "ppo"],
    "report": ["report"],
}
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"}  # audit events
CALLERS = 2  # functions of the project, innermost first, that make a place
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


class Moment(NamedTuple):
    """Where and when a stage is killed."""

    place: str
    time: int  # how often it had come there before
    after: bool  # at the next event of Python's after it, not before it


class Killer:
    """An audit hook that counts the places where a process changes files in a folder, and kills it at one of them."""

    def __init__(self, folder: Path, moment: Moment | None = None) -> None:
        self.folder, self.moment, self.seen = str(folder), moment, Counter[str]()
        self._due, self._own = False, threading.local()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._due:
            self._due = False  # the kill is an event too
            os.kill(os.getpid(), signal.SIGKILL)
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            self.note(event, arguments[0])

    def note(self, event: str, path: str | bytes | int) -> None:
        if getattr(self._own, "busy", False) or isinstance(path, int) or not (place := place_of(event)):
            return
        self._own.busy = True
        inside = str(Path(os.fsdecode(path)).absolute()).startswith(self.folder)
        self._own.busy = False
        if inside and "__pycache__" not in os.fsdecode(path):
            before, self.seen[place] = self.seen[place], self.seen[place] + 1
            if self.moment and (place, before) == self.moment[:2]:
                self._due = True
                if not self.moment.after:
                    self("", ())

    def watch(self) -> None:
        """Begins to count; what MLflow writes into its store, of which Python knows nothing, counts too."""
        from sqlalchemy import Engine, event

        sys.addaudithook(self)
        event.listen(Engine, "before_cursor_execute", lambda *given: self.note(given[2].split()[0], self.folder))


def place_of(event: str) -> str:
    """The event, and the lines of the project's own code that led to it; "" if none did."""
    frame, found = sys._getframe(2), list[str]()
    while frame and len(found) < CALLERS:
        path = Path(frame.f_code.co_filename)
        if {"agent_r1", "flows"} & set(path.parts) and "site-packages" not in path.parts:
            found.append(f"{path.parent.name}/{path.name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join([event, *found]) if found else ""


def run_stage(folder: Path, words: Sequence[str], killer: Killer, record: Path | None = None) -> int:
    """Runs a stage in a copy of this process, which has imported all libraries; returns its exit code.

    Waits for the ranks too. A `record` takes the places that it came to, and the modules that it imported.
    """
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        psutil.wait_procs(running(folder), PATIENCE_S)
        return code
    try:
        _stage_here(folder, words, killer, record)
    finally:
        os._exit(1)


def _stage_here(folder: Path, words: Sequence[str], killer: Killer, record: Path | None) -> None:
    from flows import __main__ as command

    def leave(code: int) -> NoReturn:
        if record:
            record.write_text(json.dumps([killer.seen, [*sys.modules]]))
        ends(code)

    ends, command.leave = command.leave, leave
    os.chdir(folder)
    os.environ.update(environment(folder))
    for output in (1, 2):
        os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), output)
    sys.argv = ["agent-r1", *words]
    killer.watch()
    command.main()


def all_files(folder: Path) -> dict[str, bytes]:
    """The names of all files of a project's results, with their bits where these are the same each time."""
    outputs = [path for place in ("data", "outputs", "temporary") for path in (folder / place).rglob("*")]
    names = {str(path.relative_to(folder)): b"" for path in outputs if path.is_file()}
    records = {
        name: (folder / name).read_bytes() for name in names if Path(name).name in ("progress.json", "SHA256SUMS")
    }
    return names | bits(folder) | records


def moments(seen: dict[str, int]) -> list[Moment]:
    times = {place: sorted({0, count // 2, count - 1}) for place, count in seen.items()}
    return [Moment(place, at, after) for place in times for at in times[place] for after in (False, True)]


def inject(scratch: Path, chosen: Sequence[str], only: str) -> int:
    """Kills the chosen stages at all moments whose place holds `only`; returns how many ended otherwise."""
    from flows.stage import prepare_process

    ready, folder, record, wrong = scratch / "ready", scratch / "folder", scratch / "record.json", 0
    copy_project(ready)
    make_small(ready, f"{TINY}engine: {{kind: transformers}}\n")
    os.chdir(ready)
    prepare_process()  # as the copies of this process are to be, before torch is imported
    last = max(map([*INJECTED].index, chosen))
    for name, words in [*INJECTED.items()][: last + 1]:
        parameters = (ready / "params.yaml").read_text()
        (ready / "params.yaml").write_text(parameters.replace("processes: 1", "processes: 2", name == "ranks"))
        shutil.copytree(ready, alone := scratch / name, symlinks=True)
        if run_stage(alone, words, Killer(alone), record):
            sys.exit((alone / "log").read_text())
        expected, [seen, modules] = all_files(alone), json.loads(record.read_text())
        for module in modules:
            with suppress(Exception):
                importlib.import_module(module)
        kills = [each for each in moments(seen) if only in each.place] if name in chosen else []
        for moment in kills:
            shutil.copytree(ready, folder, symlinks=True)
            first = run_stage(folder, words, Killer(folder, moment))
            second = run_stage(folder, words, Killer(folder))
            found = all_files(folder)
            others = sorted(path for path in {*found, *expected} if found.get(path) != expected.get(path))
            differs = first != -signal.SIGKILL or second != 0 or bool(others)
            wrong += differs
            print(f"{name}, {moment}: {f'{first}, then {second}, {others}' if differs else 'the same'}", flush=True)
            shutil.rmtree(folder)
        print(f"{name}: {len(kills)} kills, at some of {len(seen)} places; wrong so far: {wrong}", flush=True)
        (alone / "params.yaml").write_text(parameters)
        ready = alone
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ends", type=int, default=35)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--injected", nargs="*", choices=[*INJECTED], help="kills these stages everywhere; else all")
    parser.add_argument("--only", default="", help="with --injected: at places that hold this text")
    arguments = parser.parse_args()
    if arguments.injected is not None:
        scratch = Path(tempfile.mkdtemp())  # which no copy of this process removes when it ends
        try:
            sys.exit(bool(inject(scratch, arguments.injected or [*INJECTED], arguments.only)))
        finally:
            shutil.rmtree(scratch)
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
