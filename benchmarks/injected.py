"""Ends each stage where it changes files, or fills its disk: `python -m benchmarks.injected [STAGES]`, from the root.

A stage is killed before and after each place in the code that writes, renames, links or removes something, the first, a
middle and the last time that it comes there, and is started again. With `--full`, as root, it finds so many bytes free
in place of that, until it has ended, and again finds enough. Then all files are there that a stage left alone has, with
the same bits. Prints a line per end, and exits with 1 if anything differed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import psutil

from benchmarks.kills import PATIENCE_S, bits, environment, make_small, running
from benchmarks.reruns import copy_project

TINY = """
prepare: {atlas: {people: 20, films: 10, companies: 5, cities: 5, countries: 3,
  train_questions: 40, dev_questions: 4, test_questions: 4}}
model: {threads: 1}
warm_start: {vocab_size: 640, hidden_size: 64, layers: 2, heads: 2, demonstrations: 40, naive_rag_demonstrations: 8,
  batch_size: 8, steps: 9, checkpoint_every: 2}
env: {top_k: 1, max_steps: 4, max_tokens: 448, max_action_tokens: 8}
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
engine: {kind: transformers}
repro_baselines: []
"""
STAGES = {  # the words of each stage, in the order of the graph; the first is DVC's, and what it leaves is not used
    "lock": ["repro", "--quiet", "--single-item", "prepare"],
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
HOMES = {"agent_r1", "flows", "dvc"}  # of the code whose places count
CALLERS = 2  # functions there, innermost first, that make a place
SIZES = 10  # of the space that another writer leaves
DISK_MIB = 256


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
    """The event, and the lines of the project's or DVC's code that led to it; "" if none did."""
    frame: FrameType | None = sys._getframe(2)
    found = list[str]()
    while frame and len(found) < CALLERS:
        path = Path(frame.f_code.co_filename)
        if HOMES & set(path.parts):
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
    from flows.__main__ import main as command
    from flows.dvc_files import DVC

    def leave(status: int) -> NoReturn:
        if record:
            record.write_text(json.dumps([killer.seen, [*sys.modules]]))
        ends(status)

    ends, os._exit = os._exit, leave
    os.chdir(folder)
    os.environ.update(environment(folder))
    for output in (1, 2):
        os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), output)
    sys.argv = ["agent-r1", *words]
    killer.watch()
    exec(DVC[2], {}) if words[0] == "repro" else command()


def all_files(folder: Path) -> dict[str, bytes]:
    """The names of all files of a project's results, with their bits where these are the same each time."""
    outputs = [path for place in ("data", "outputs", "temporary") for path in (folder / place).rglob("*")]
    names = {str(path.relative_to(folder)): b"" for path in outputs if path.is_file()}
    records = [name for name in names if Path(name).name in ("progress.json", "SHA256SUMS")]
    records += ["dvc.lock"] if (folder / "dvc.lock").exists() else []
    return names | bits(folder) | {name: (folder / name).read_bytes() for name in records}


def moments(seen: dict[str, int]) -> list[Moment]:
    times = {place: sorted({0, count // 2, count - 1}) for place, count in seen.items()}
    return [Moment(place, at, after) for place in times for at in times[place] for after in (False, True)]


def used(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def start_badly(folder: Path, words: Sequence[str], how: Moment | int) -> bool:
    """Starts a stage that is killed, or finds so few bytes free until it has ended; whether it ended as it had to."""
    if isinstance(how, Moment):
        return run_stage(folder, words, Killer(folder, how)) == -signal.SIGKILL
    filler, disk = folder.with_name("filler"), os.statvfs(folder)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - how)
    code = run_stage(folder, words, Killer(folder))
    filler.unlink()
    return code >= 0


def inject(scratch: Path, disk: Path, chosen: Sequence[str], only: str, *, full: bool) -> int:
    """Kills the chosen stages at all moments whose place holds `only`, or fills their disk; counts the other ends."""
    from flows.stage import prepare_process

    ready, record, wrong = scratch / "ready", scratch / "record.json", 0
    copy_project(ready)
    make_small(ready, TINY)
    os.chdir(ready)
    prepare_process()  # as the copies of this process are to be, before torch is imported
    last = max(map([*STAGES].index, chosen))
    for name, words in [*STAGES.items()][: last + 1]:
        if name == "lock" and name not in chosen:
            continue
        parameters = (ready / "params.yaml").read_text()
        (ready / "params.yaml").write_text(parameters.replace("processes: 1", "processes: 2", name == "ranks"))
        shutil.copytree(ready, alone := scratch / name, symlinks=True)
        if run_stage(alone, words, Killer(alone), record):
            sys.exit((alone / "log").read_text())
        seen, modules = json.loads(record.read_text())
        for module in modules:
            with suppress(Exception):
                importlib.import_module(module)
        grown = used(alone) - used(ready)
        hows: list[Moment | int] = [grown * part // SIZES for part in range(SIZES)]
        hows = hows if full else [each for each in moments(seen) if only in each.place]
        for how in hows if name in chosen else []:
            said = other_end(ready, alone, disk / "project", words, how)
            wrong += bool(said)
            print(f"{name}, {how}: {said or 'the same'}", flush=True)
        print(f"{name}: {len(seen)} places; wrong so far: {wrong}", flush=True)
        (alone / "params.yaml").write_text(parameters)
        ready = ready if name == "lock" else alone
    return wrong


def other_end(ready: Path, alone: Path, folder: Path, words: Sequence[str], how: Moment | int) -> str:
    """Ends a stage so and starts it again; the difference from one left alone in words, "" if there is none."""
    shutil.copytree(ready, folder, symlinks=True)
    as_meant, code = start_badly(folder, words, how), run_stage(folder, words, Killer(folder))
    found, expected = all_files(folder), all_files(alone)
    others = sorted(path for path in {*found, *expected} if found.get(path) != expected.get(path))
    shutil.rmtree(folder)
    return "" if as_meant and not code and not others else f"as meant: {as_meant}, then {code}, {others}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", choices=[*STAGES], help="all, if none is named")
    parser.add_argument("--full", action="store_true", help="fills the disk, and kills nothing")
    parser.add_argument("--only", default="", help="kills at places that hold this text")
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    (disk := scratch / "disk").mkdir()
    if given.full:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "full", disk], check=True)
    try:
        sys.exit(bool(inject(scratch, disk, given.stages or [*STAGES], given.only, full=given.full)))
    finally:  # where no copy of this process comes
        if given.full:
            subprocess.run(["umount", disk], check=True)
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
