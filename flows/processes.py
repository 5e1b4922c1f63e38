"""Child processes that leave nothing behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

GRACE_S = 10.0
WATCH_S = 0.5


@contextmanager
def process_group(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: IO[str] | int = subprocess.PIPE,
    grace_s: float = GRACE_S,
) -> Iterator[subprocess.Popen[str]]:
    """Runs a command in a process group of its own, of which nothing is left when the block ends.

    Its output, errors included, goes to `output`; what is left of it at the end may take `grace_s` to end itself.
    """
    process = subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        end_group(process, grace_s)


def end_group(process: subprocess.Popen[str], grace_s: float) -> None:
    """Asks a process group to end; kills what has not after `grace_s`, or at a second interrupt."""
    try:
        _send(process, signal.SIGTERM, grace_s)
    finally:
        _send(process, signal.SIGKILL, grace_s)
        process.wait()


@functools.cache
def end_with_parent() -> None:
    """From now on this process gets a SIGTERM when the one that started it is gone, however that ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _send(process: subprocess.Popen[str], number: signal.Signals, grace_s: float) -> None:
    """Signals the group and waits until it is empty, `grace_s` at most."""
    deadline = time.monotonic() + grace_s
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
        while time.monotonic() < deadline:
            process.poll()  # reaps the leader: as a zombie it would stay in the group
            os.killpg(process.pid, 0)
            time.sleep(0.02)
