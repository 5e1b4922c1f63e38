"""Hostile inputs by the thousand: `python -m benchmarks.hostile`, or `make hostile`.

Every kind runs in a process of its own, with a limit of memory. Prints for each kind how many inputs were tried,
refused by name and accepted, how many defects there were, and the slowest and the largest input; then each defect,
with the command that repeats it. A defect is an exception that the code does not document for bad input, a message
that names nothing, a limit of time or memory that was passed, or an input that was taken for what it is not. The exit
code is 1 if there is any. Time is counted in the processor's seconds, or in what a control does meanwhile.

Not tried are the servers of Prefect and MLflow, what ranks and vLLM say to each other, programs in the sandbox, DVC's
commands, pages in a browser, kills and full disks, many at once, and a second account but for what it leaves behind.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.hostile.campaign import KINDS, Tally, Verdict, attempt, bounded, generator
from benchmarks.hostile.kind import Kind

HANG_S = 30.0  # without a verdict, and as many of this process's own seconds at work on the same machine
FORK = get_context("fork")  # what was imported need not be imported again


def main(seed: int, per_kind: int | None, chosen: list[str]) -> int:
    """Prints the table; returns the number of defects."""
    started, defects = time.perf_counter(), []
    print(f"{'kind':<18} {'tried':>6} {'refused':>8} {'accepted':>9} {'defects':>8} {'slowest':>8} {'largest':>8}")
    tallies = []
    for kind in (kind for kind in KINDS if kind.name in chosen or not chosen):
        tally = Tally(kind.name)
        for index, verdict in enumerate(verdicts(kind, seed, min(per_kind or kind.tried, kind.tried))):
            tally.add(verdict)
            if verdict.defect:
                defects.append(f"--seed {seed} --kind '{kind.name}' --index {index}: {verdict.defect:.600}")
        tallies.append(tally)
        print(tally, flush=True)
    print(Tally.total(tallies))
    times = os.times()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    print(f"{time.perf_counter() - started:.0f} s, {cpu_s:.0f} of the processor; seed {seed}")
    for defect in defects:
        print(f"python -m benchmarks.hostile {defect}")
    return len(defects)


def verdicts(kind: type[Kind], seed: int, count: int) -> Iterator[Verdict]:
    """A verdict on each input; one that ends or holds up its process is a defect, and the next has a new process."""
    done = 0
    while done < count:
        receiver, sender = FORK.Pipe(duplex=False)
        child = FORK.Process(target=_judge_all, args=(kind, seed, done, count, sender))
        child.start()
        sender.close()
        try:
            while done < count and _comes(receiver):
                yield receiver.recv()
                done += 1
            problem = f"no verdict while another process worked for {HANG_S} s"
        except EOFError:
            problem = "its process ended"
        child.kill()
        child.join()
        if done < count:
            yield Verdict(f"{problem}, with code {child.exitcode}", seconds=HANG_S)
            done += 1


def _comes(receiver: Connection) -> bool:
    """Whether a verdict comes. A busy machine holds up the work of this process as it does the other's."""
    there, worked = receiver.poll(HANG_S), time.process_time()
    while not there and time.process_time() - worked < HANG_S:
        sum(range(1_000_000))
        there = receiver.poll()
    return there


def _judge_all(kind: type[Kind], seed: int, start: int, stop: int, sender: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="hostile.") as folder:
        made = kind(Path(folder))
        bounded(kind.limit_mib)
        for index in range(start, stop):
            sender.send(attempt(made, seed, index))


def repeat(seed: int, name: str, index: int) -> None:
    """Gives one input to the code once more, with the traceback of whatever it raises."""
    [kind] = [kind for kind in KINDS if kind.name == name]
    with tempfile.TemporaryDirectory(prefix="hostile.") as folder:
        made = kind(Path(folder))
        given = made.make(generator(kind, seed, index))
        print(f"{given!r:.2000}")
        made.judge(given)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Gives hostile inputs to everything that reads what others wrote.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-kind", type=int, help="inputs at most; without it a whole campaign")
    parser.add_argument("--kind", action="append", default=[], choices=[kind.name for kind in KINDS])
    parser.add_argument("--index", type=int, help="of one input of one --kind, to see what it does")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.index is not None:
        repeat(options.seed, *options.kind, options.index)
    else:
        sys.exit(bool(main(options.seed, options.per_kind, options.kind)))
