"""Another account of the machine. Only root can play it: without root a test holds modes and refusals alone."""

import fcntl
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

UID = 65534


def needs_root() -> None:
    """Skips what is left of a test where nobody can be played."""
    if os.getuid():
        pytest.skip("without root there is no other account: modes and refusals were looked at, no attack was tried")


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that every account may enter; pytest's own are closed."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name).resolve()


@contextmanager
def holding(paths: Iterable[Path]) -> Iterator[int]:
    """The number of files whose lock the other account got by opening them for reading; it holds them in the block."""
    tried, (reading, writing) = list(paths), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(120)
            become_neighbour()
            held = 0
            for path in tried:
                with suppress(OSError):
                    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held += 1
            os.write(writing, bytes([held]))
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        yield os.read(reading, 1)[0]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)


def become_neighbour() -> None:
    """Makes this process the other account's, for good."""
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)


def by_neighbour(act: Callable[[], object]) -> str:
    """What a function gives as text, or its fault, in a process of the other account; without root, of this one."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing"
        try:
            if os.getuid() == 0:
                become_neighbour()
            said = str(act())
        except BaseException as fault:  # the test reads it
            said = repr(fault)
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        said = told.read()
    os.waitpid(child, 0)
    return said
