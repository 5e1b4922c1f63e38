"""The servers of this machine: where they are, what they need, and whether they are those that are meant."""

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
from importlib.metadata import version
from pathlib import Path

from flows.processes import process_group
from flows.stage import server_answers

HOST = "127.0.0.1"
POOL = "agent_r1"  # the work pool of prefect.yaml
PROMOTION = "agent_r1-promotion"  # the limit under which one process at a time moves the champion
STARTUP_S = 120.0
ANSWER_S = 10.0  # for a server on this machine, or near it
HOME = Path(".tracking/prefect")  # keeps the history of pipelines that had no server of their own
MLFLOW_UI = "AGENT_R1_MLFLOW_UI"  # set by flows.operation.serving: where a browser finds MLflow

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
    """The same for the server, which says what is wrong and nothing else."""
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


def mlflow_ui(port: int = 5000) -> str:
    """Where a browser finds MLflow: what `make serve` says, the tracking server, or else this port of this machine."""
    tracking = os.environ.get("MLFLOW_TRACKING_URI", "")
    return os.environ.get(MLFLOW_UI) or (tracking if tracking.startswith("http") else f"http://{HOST}:{port}")


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


def require_free(port: int, variable: str) -> None:
    """Checks that a server can be started on a port.

    Raises:
        ValueError: something listens there.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was used a minute ago is free
        try:
            probe.bind((HOST, port))
        except OSError as fault:
            raise ValueError(
                f"port {port} of {HOST} cannot be used ({fault.strerror}); end what listens there, or choose another: "
                f"make serve {variable}={port + 1}"
            ) from fault


def require_server(api_url: str) -> None:
    """Checks that a Prefect server answers, and that it is one that this project's Prefect can talk to.

    Raises:
        OSError: nothing answers.
        ValueError: it is no Prefect server, or of another version.
    """
    try:
        found = served_version(f"{api_url}/admin/version")
    except OSError as fault:
        raise OSError(
            f"no Prefect server answers at PREFECT_API_URL {api_url} ({fault}); start it there, correct the address, "
            "or unset PREFECT_API_URL for a server on this machine"
        ) from fault
    except ValueError as fault:
        raise ValueError(f"PREFECT_API_URL {api_url} is no Prefect server; it should end in /api") from fault
    ours = version("prefect")
    if found.split(".")[:2] != ours.split(".")[:2]:
        raise ValueError(
            f"the server at PREFECT_API_URL {api_url} is Prefect {found}, and this project has {ours}; run the same "
            "minor version on both sides"
        )


def served_version(url: str) -> str:
    """What the version page of a Prefect or MLflow server says.

    Raises:
        OSError: nothing answers, or with an error.
        ValueError: the answer is no version.
    """
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
        text = answer.read(100).decode().strip().strip('"')
    if not text[:1].isdigit():
        raise ValueError(f"{url} says {text!r}, which is no version")
    return str(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
