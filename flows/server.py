"""A Prefect server on this machine, for as long as a pipeline needs one."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flows.processes import process_group
from flows.stage import server_answers

HOST = "127.0.0.1"
STARTUP_S = 120.0
HOME = Path(".tracking/prefect")  # keeps the history of pipelines that had no server of their own

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A process that serves, alone or beside others."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path  # where it writes what it says
    health: str = ""  # the URL at which a server answers once it is up


@contextmanager
def prefect_server() -> Iterator[str]:
    """The API URL of the server that `PREFECT_API_URL` names, or of one that lives as long as the block.

    Raises:
        OSError: as `await_health`.
    """
    if server_answers():
        yield os.environ["PREFECT_API_URL"]
        return
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    server = server_part(port)
    # A group of its own: an interrupt from the terminal must not reach the server before the flow has reported it.
    with server.log.open("w") as log, process_group(server.command, server.environment, output=log) as process:
        await_health(process, server)
        logger.info("Prefect at http://%s:%d while the pipeline runs", HOST, port)
        yield api_on(port)


def api_on(port: int) -> str:
    """Where a Prefect server on a port of this machine answers."""
    return f"http://{HOST}:{port}/api"


def prefect_environment(api_url: str) -> dict[str, str]:
    """This process's environment for a part of Prefect: everything it writes is under .tracking."""
    home = HOME.absolute()
    return {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_API_URL": api_url,
    }


def server_part(port: int) -> Part:
    """A Prefect server that this machine alone can reach, and that says what is wrong and nothing else."""
    return Part(
        name="Prefect server",
        command=[sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)],
        environment={
            **prefect_environment(api_on(port)),
            "PREFECT_SERVER_DATABASE_TIMEOUT": "60",  # seconds; on SQLite requests wait for each other
            "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
            "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
            "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",  # its task queue fails at every poll on SQLite: issue 23051
        },
        log=log_path("server"),
        health=f"{api_on(port)}/health",
    )


def log_path(part: str) -> Path:
    """Where a part that runs in the background writes what it says."""
    HOME.mkdir(parents=True, exist_ok=True)
    return HOME / f"{part}.log"


def await_health(process: subprocess.Popen[str], part: Part) -> None:
    """Waits until a server that was just started answers.

    Raises:
        OSError: it ended, or did not answer in time.
    """
    deadline = time.monotonic() + STARTUP_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(part.health, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise OSError(f"the server at {part.health} did not come up, see {part.log}")
