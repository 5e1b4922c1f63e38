"""One stage at a time on the accelerator, or on the CPU where there is none."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)


def accelerator_lock() -> Path:
    """The lock file: one per machine and user, so that two clones of the project queue up as well."""
    return Path(tempfile.gettempdir()) / f"agent_r1-{os.getuid()}.lock"


@contextmanager
def accelerator() -> Iterator[None]:
    """Holds the machine's accelerator; waits while another stage holds it.

    The kernel frees the lock when the process ends, however it ends.
    """
    # Not "w": opening must not wipe the holder's process id.
    with accelerator_lock().open("a+") as file:
        _wait_for(file)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _wait_for(file: TextIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        logger.info("waiting for the accelerator, held by process %s", file.read())
        fcntl.flock(file, fcntl.LOCK_EX)
