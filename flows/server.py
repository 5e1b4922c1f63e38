"""The Prefect server that a pipeline reports to."""

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
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    # A group of its own: an interrupt from the terminal must not reach the server before the flow has reported it.
    with (
        _log_file().open("w") as log,
        process_group(command, _server_environment(f"{url}/api"), output=log) as process,
    ):
        _await_health(process, f"{url}/api/health")
        logger.info("Prefect at %s while the pipeline runs", url)
        yield f"{url}/api"


def _log_file() -> Path:
    HOME.mkdir(parents=True, exist_ok=True)
    return HOME / "server.log"


def _server_environment(api_url: str) -> dict[str, str]:
    home = HOME.absolute()
    return {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    }


def _await_health(process: subprocess.Popen[str], url: str) -> None:
    deadline = time.monotonic() + STARTUP_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise OSError(f"the Prefect server at {url} did not come up, see {HOME}/server.log; or set PREFECT_API_URL")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
