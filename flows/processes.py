"""Child processes that leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

GRACE_S = 10.0


@contextmanager
def process_group(
    command: Sequence[str], environment: Mapping[str, str], output: IO[str] | int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """Runs a command in a process group of its own, of which nothing is left when the block ends.

    Args:
        command: program and arguments.
        environment: all of the command's environment variables.
        output: where its output goes, errors included.
    """
    process = subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[str]) -> None:
    """Asks a process group to end; kills what has not after `GRACE_S`, or at a second interrupt."""
    try:
        _send(process, signal.SIGTERM)
    finally:
        _send(process, signal.SIGKILL)
        process.wait()


def _send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signals the group and waits until it is empty, `GRACE_S` at most."""
    deadline = time.monotonic() + GRACE_S
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
        while time.monotonic() < deadline:
            process.poll()  # reaps the leader: as a zombie it would stay in the group
            os.killpg(process.pid, 0)
            time.sleep(0.02)
