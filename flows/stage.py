"""What every stage's command does around the stage: logging, faults, signals, the accelerator's lock, tracking."""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import functools
import logging
import os
import platform
import signal
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TextIO, TypeVar
from uuid import UUID

from rich.logging import RichHandler

from agent_r1.params import SWEEP
from flows.processes import end_with_parent

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


P = ParamSpec("P")
R = TypeVar("R")

PARENT_TASK_RUN = "AGENT_R1_PARENT_TASK_RUN"  # set by the pipeline: the task run that shows the stage as its subflow
SHOW_TRACEBACK = "AGENT_R1_TRACEBACK"
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
UNAVAILABLE = os.EX_TEMPFAIL  # 75
# A file that is not there, or in the way, stays so however often it is asked for.
LASTING = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def run_stage(stage: Callable[..., None], **parameters: str | int | None) -> None:
    """Runs a stage as the whole of its process: the last line of `python -m flows.<stage>`.

    The stage is a tracked Prefect flow when `PREFECT_API_URL` is set and answers, else the plain function, for which
    Prefect is not even imported. What a user can mend (ValueError, OSError) ends as one message and exit code 1, or 75
    where the same may work later, without anybody's doing (a server that does not answer, a disk that fails); an
    interrupt ends as 130, a termination as 143; any other fault keeps its traceback.

    Args:
        stage: the stage's function; its name is the flow's.
        parameters: its keyword arguments, shown with the tracked run.
    """
    keep_freed_memory()
    if PARENT_TASK_RUN in os.environ:
        end_with_parent()
    with clean_end():
        if server_answers():
            _run_tracked(stage, parameters)
        else:
            stage(**parameters)


def add_member_arguments(parser: argparse.ArgumentParser) -> None:
    """The options by which a stage is told which seed of a run, and which sweep, it works on."""
    parser.add_argument("--seed", type=int, help="in place of the run's own; its outputs get folders of their own")
    parser.add_argument("--sweep", choices=[SWEEP], help="as a member of this sweep of params.yaml")


@contextmanager
def clean_end() -> Iterator[None]:
    """The rim of a command: sets up logging, and turns signals and what a user can mend into exit codes."""
    configure_logging()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt:
        logger.warning("interrupted")
        sys.exit(INTERRUPTED)
    except (ValueError, OSError) as fault:
        if os.environ.get(SHOW_TRACEBACK):
            raise
        logger.error("%s", explain(fault))
        sys.exit(UNAVAILABLE if is_transient(fault) else 1)


def task(function: Callable[P, R]) -> Callable[P, R]:
    """Makes each call of a function a Prefect task while a tracked flow runs; otherwise it stays the plain function."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _in_flow():
            return function(*args, **kwargs)
        return _call_as_task(function.__name__, functools.partial(function, *args, **kwargs))

    return call


def configure_logging() -> None:
    """INFO from the project, WARNING from the libraries; rich on a terminal, plain lines elsewhere."""
    handler: logging.Handler = RichHandler(show_path=False) if sys.stderr.isatty() else logging.StreamHandler()
    pattern = "%(message)s" if sys.stderr.isatty() else "%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(pattern, datefmt="%H:%M:%S"))
    handler.addFilter(_not_a_run_of_prefect)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("agent_r1", "flows", "__main__"):
        logging.getLogger(name).setLevel(logging.INFO)


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory instead of giving it back and faulting it in again at every training step.

    The same as MALLOC_MMAP_MAX_=0 and no trimming, but for a process that runs already; see mallopt(3).
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, -1)


def server_answers() -> bool:
    """Whether `PREFECT_API_URL` names a server that is up."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return False
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (OSError, ValueError) as fault:
        logger.warning("PREFECT_API_URL %s does not answer (%s): going on without it", url, fault)
        return False


def is_transient(fault: Exception) -> bool:
    """Whether the same may work later, without anybody's doing: a disk or a connection failed."""
    return isinstance(fault, OSError) and not isinstance(fault, LASTING)


def explain(fault: Exception) -> str:
    """The fault's message and the line that raised it."""
    origin = traceback.extract_tb(fault.__traceback__)[-1]
    where = f"{os.path.relpath(origin.filename)}:{origin.lineno}"
    return f"{fault}\n(raised at {where}; {SHOW_TRACEBACK}=1 shows the whole traceback)"


def _terminate(*_: object) -> None:
    sys.exit(TERMINATED)


def _not_a_run_of_prefect(record: logging.LogRecord) -> bool:
    """Prefect's account of its runs, tracebacks included, is for its own pages; the terminal shows ours."""
    return not record.name.startswith(("prefect.flow_runs", "prefect.task_runs"))


def _run_tracked(stage: Callable[..., None], parameters: dict[str, str | int | None]) -> None:
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.exceptions import TerminationSignal
    from prefect.flow_engine import run_flow

    tracked = flow(name=stage.__name__)(stage)
    parent = os.environ.get(PARENT_TASK_RUN)
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(
            tracked,
            name=" ".join([stage.__name__, *(str(value) for value in parameters.values() if value is not None)]),
            parameters=parameters,
            parent_task_run_id=UUID(parent) if parent else None,
        )
    try:
        run_flow(tracked, flow_run=run, parameters=parameters)
    except TerminationSignal:  # Prefect takes SIGTERM over while a flow runs
        sys.exit(TERMINATED)


def _in_flow() -> bool:
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext

    return FlowRunContext.get() is not None


def _call_as_task(name: str, call: Callable[[], R]) -> R:
    """Prefect looks into every argument and keeps every result until the flow ends; this way it sees neither."""
    from prefect import task as prefect_task
    from prefect.cache_policies import NO_CACHE

    results: list[R] = []

    @prefect_task(name=name, cache_policy=NO_CACHE, retries=0)
    def body() -> None:
        results.append(call())

    body()
    return results[0]
