"""A Prefect server on this machine, for as long as a pipeline needs one."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.processes import process_group
from flows.stage import server_answers

HOST = "127.0.0.1"
STARTUP_S = 120.0
HOME = Path(".tracking/prefect")  # keeps the history of pipelines that had no server of their own

logger = logging.getLogger(__name__)


@contextmanager
def prefect_server() -> Iterator[str]:
    """The API URL of the server that `PREFECT_API_URL` names, or of one that lives as long as the block.

    Raises:
        OSError: the server did not come up.
    """
    if server_answers():
        yield os.environ["PREFECT_API_URL"]
        return
    port = _free_port()
    api_url, log_file = api_on(port), log_path("server")
    # A group of its own: an interrupt from the terminal must not reach the server before the flow has reported it.
    with (
        log_file.open("w") as log,
        process_group(server_command(port), server_environment(api_url), output=log) as process,
    ):
        await_health(process, f"{api_url}/health", log_file)
        logger.info("Prefect at http://%s:%d while the pipeline runs", HOST, port)
        yield api_url


def api_on(port: int) -> str:
    """Where a Prefect server on a port of this machine answers."""
    return f"http://{HOST}:{port}/api"


def server_command(port: int) -> list[str]:
    """Starts a Prefect server that this machine alone can reach."""
    return [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]


def prefect_environment(api_url: str) -> dict[str, str]:
    """This process's environment for a part of Prefect: everything it writes is under .tracking."""
    home = HOME.absolute()
    return {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_API_URL": api_url,
    }


def server_environment(api_url: str) -> dict[str, str]:
    """The environment of a Prefect server that says what is wrong and nothing else."""
    return {
        **prefect_environment(api_url),
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",  # seconds; on SQLite requests wait for each other
        "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",  # its task queue fails at every poll on SQLite: Prefect's issue 23051
    }


def log_path(part: str) -> Path:
    """Where a part that runs in the background writes what it says."""
    HOME.mkdir(parents=True, exist_ok=True)
    return HOME / f"{part}.log"


def await_health(process: subprocess.Popen[str], url: str, log: Path) -> None:
    """Waits until a server that was just started answers.

    Raises:
        OSError: it ended, or did not answer in time.
    """
    deadline = time.monotonic() + STARTUP_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise OSError(f"the server at {url} did not come up, see {log}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
