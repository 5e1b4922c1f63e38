"""What serves this machine, started and ended together: `python -m flows serving`, or `make serve`."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agent_r1.tracking.store import open_store, store_file
from flows.processes import process_group
from flows.server import (
    HOST,
    MLFLOW_UI,
    POOL,
    api_on,
    await_health,
    log_path,
    mlflow_ui,
    prefect_environment,
    require_free,
    require_server,
    server_command,
    server_environment,
)
from flows.stage import clean_end

GRACE_S = 40.0  # for the worker's runs to end their stages and to say so
STEADY_S = 20.0  # a worker that died sooner would only die again
WATCH_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the processes: what it is called, what starts it, where it writes what it says."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


@dataclass(frozen=True, kw_only=True)
class Server(Part):
    """A part that answers at `health` once it is up."""

    health: str


Running = tuple[Part, subprocess.Popen[str]]


def serve(prefect_port: int, mlflow_port: int) -> None:
    """Runs a Prefect server with the deployments, a worker and the MLflow UI, until interrupted or a part dies.

    With `PREFECT_API_URL` that server is used and none is started; with an `MLFLOW_TRACKING_URI` on HTTP no MLflow UI.
    A worker that dies after it was steady for `STEADY_S` is started again; what it ran is ended, and shown as crashed.

    Raises:
        ValueError: a port is taken, or the server is of another version.
        OSError: the server of `PREFECT_API_URL` does not answer, or a part did not come up, or died.
    """
    remote = os.environ.get("PREFECT_API_URL")
    environment = prefect_environment(remote or api_on(prefect_port))
    with _running([*_prefect_servers(remote, prefect_port), *_mlflow_servers(mlflow_port)]) as servers:
        _deploy(environment, restarted=not remote)
        logger.info("Prefect at %s, MLflow at %s; Ctrl-C ends everything", _page(environment), mlflow_ui(mlflow_port))
        _keep_working(_worker(environment, mlflow_ui(mlflow_port)), servers)


def show_mlflow(port: int) -> None:
    """Runs the MLflow UI alone, until interrupted.

    Raises:
        ValueError: the port is taken, or MLflow has a server already.
        OSError: it did not come up, or died.
    """
    found = _mlflow_servers(port)
    if not found:
        raise ValueError(f"MLFLOW_TRACKING_URI names a server, which shows its runs itself: {mlflow_ui()}")
    with _running(found) as servers:
        logger.info("MLflow at %s; Ctrl-C ends it", mlflow_ui(port))
        raise OSError(_obituary(_first_to_end(servers)))


def _prefect_servers(remote: str | None, port: int) -> list[Server]:
    if remote:
        require_server(remote)
        return []
    require_free(port, "PREFECT_PORT")
    return [
        Server(
            name="Prefect server",
            command=server_command(port),
            environment=server_environment(api_on(port)),
            log=log_path("server"),
            health=f"{api_on(port)}/health",
        )
    ]


def _mlflow_servers(port: int) -> list[Server]:
    if os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http"):
        return []
    require_free(port, "MLFLOW_PORT")
    open_store()  # a UI and a training that make it at the same time can break each other
    store = f"sqlite:///{store_file()}"
    command = ["mlflow", "ui", "--host", HOST, "--port", str(port), "--workers", "1", "--backend-store-uri", store]
    return [
        Server(
            name="MLflow UI",
            command=[sys.executable, "-m", *command],
            environment={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            log=log_path("mlflow"),
            health=f"http://{HOST}:{port}/health",
        )
    ]


def _worker(environment: Mapping[str, str], mlflow_url: str) -> Part:
    return Part(
        name="worker",
        command=[sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"],
        environment={**environment, MLFLOW_UI: mlflow_url},
        log=log_path("worker"),
    )


def _deploy(environment: Mapping[str, str], *, restarted: bool) -> None:
    command = [sys.executable, "-m", "flows", "deploy", *(["--restarted"] if restarted else [])]
    if code := subprocess.run(command, env=environment, check=False).returncode:
        sys.exit(code)  # its own lines say why


def _keep_working(worker: Part, servers: Sequence[Running]) -> None:
    """Runs the worker beside the servers; returns by raising what ended them."""
    worker.log.unlink(missing_ok=True)
    while True:
        started = time.monotonic()
        with _process(worker) as process:
            ended = _first_to_end([*servers, (worker, process)])
        if ended[0] is not worker or time.monotonic() - started < STEADY_S:
            raise OSError(f"{_obituary(ended)}; everything else was ended too")
        logger.warning("%s; starting another, what it ran is shown as crashed", _obituary(ended))


def _first_to_end(running: Sequence[Running]) -> Running:
    """Waits until one has."""
    while True:
        for part, process in running:
            if process.poll() is not None:
                return part, process
        time.sleep(WATCH_S)


def _obituary(ended: Running) -> str:
    part, process = ended
    return f"the {part.name} ended with code {process.returncode}, see {part.log}"


@contextmanager
def _running(servers: Sequence[Server]) -> Iterator[list[Running]]:
    """Starts servers and waits until all are up; ends them with the block, the last one first."""
    with ExitStack() as stack:
        running: list[Running] = []
        for server in servers:
            server.log.unlink(missing_ok=True)
            running.append((server, stack.enter_context(_process(server))))
        for server, (_, process) in zip(servers, running, strict=True):
            await_health(process, server.health, server.log)
        yield running


@contextmanager
def _process(part: Part) -> Iterator[subprocess.Popen[str]]:
    """The part's process; it is asked to end, its children are left to it, and then nothing of its group is left."""
    with part.log.open("a") as log, process_group(part.command, part.environment, log, GRACE_S) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


def _page(environment: Mapping[str, str]) -> str:
    return environment["PREFECT_API_URL"].removesuffix("/api")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves deployments, a worker and the MLflow UI on this machine.")
    parser.add_argument("--prefect-port", type=int, default=4200, help="of the Prefect server, without PREFECT_API_URL")
    parser.add_argument("--mlflow-port", type=int, default=5000)
    parser.add_argument("--only-mlflow", action="store_true", help="the MLflow UI alone")
    arguments = parser.parse_args()
    with clean_end():
        if arguments.only_mlflow:
            show_mlflow(arguments.mlflow_port)
        else:
            serve(arguments.prefect_port, arguments.mlflow_port)


if __name__ == "__main__":
    main()
