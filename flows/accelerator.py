"""The lock of a machine's GPUs, or of the places on its CPU, for which stages queue up."""

from __future__ import annotations

import logging
import os
import platform
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from agent_r1.files import is_own, locked_some

logger = logging.getLogger(__name__)

LOCKS = "AGENT_R1_LOCKS"  # a folder in place of ~/.cache/agent_r1, for homes on shared disks without locks


@contextmanager
def accelerator(side_by_side: int, gpus: int = 1) -> Iterator[None]:
    """Holds `gpus` GPUs, or all if that is 0 or more than there are; this process and its engine see no others.

    On a machine without a GPU it holds one of `side_by_side` places on the CPU. Waits while other stages hold them. The
    kernel frees the locks when the process ends, however it ends.
    """
    from agent_r1.devices.gpus import visible_gpus  # imports torch, which reads the number of threads

    devices = visible_gpus()
    # One per machine and user, so that two clones of the project queue up as well.
    locks = own_folder() / f"accelerator-{platform.node()}"
    paths = [locks.with_name(f"{locks.name}-{place}.lock") for place in devices or range(side_by_side)]
    wanted = min(gpus or len(devices), len(devices)) if devices else 1

    def tell() -> None:
        noted = [path.read_text() for path in paths if path.exists()]
        held = [pid for pid in dict.fromkeys(noted) if pid.isdigit() and psutil.pid_exists(int(pid))]
        logger.info("waiting for the accelerator, held by process %s", ", ".join(held))

    with locked_some(paths, wanted, locks.with_name(f"{locks.name}.lock"), tell) as held:
        for path in held:
            path.write_text(str(os.getpid()))
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[paths.index(path)] for path in held)
        yield


def own_folder() -> Path:
    """The folder of this user's locks, the same from a terminal, cron or a service.

    Raises ValueError if another user may write there, or owns it.
    """
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    folder = Path(os.environ.get(LOCKS) or home / ".cache" / "agent_r1")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    if not is_own(folder, stat.S_IFDIR, closed=0o022):
        raise ValueError(f"{folder} is no folder that you alone may write to; `chmod 700` it, or set {LOCKS} to one")
    return folder
