"""Servers of this machine, started and ended together: `agent-r1 serving`, or `make serve`."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib.metadata import version

from agent_r1.harmless import without_password
from agent_r1.tracking.store import MLFLOW_UI, address, comparison, open_store, store_file
from flows.processes import (
    HOST,
    OF_CLIENTS,
    PASSWORD,
    STARTED_BY,
    Supervised,
    api_on,
    await_health,
    known,
    log_path,
    prefect_environment,
    process_group,
    server_part,
)
from flows.stage import kept_password

POOL = "agent_r1"  # the work pool of prefect.yaml
ANSWER_S = 10.0  # for a server on this machine, or near it
GRACE_S = 40.0  # for the worker's runs to end their stages and to say so
STEADY_S = 20.0  # a worker that died sooner would only die again
WATCH_S = 0.5

logger = logging.getLogger(__name__)

Running = tuple[Supervised, subprocess.Popen[str]]


def serve(prefect_port: int, mlflow_port: int, *, with_password: bool = True) -> None:
    """Runs a Prefect server with the deployments, a worker and the MLflow UI, until interrupted or a part dies.

    The server asks for the password of `own_password`, because every run that is created runs commands as this user.

    With `PREFECT_API_URL` no server is started; with an `MLFLOW_TRACKING_URI` on HTTP no MLflow UI. A worker that dies
    after `STEADY_S` is started again; its runs are ended, and shown as crashed.
    """
    remote = os.environ.get("PREFECT_API_URL")
    logger.info("starting %sMLflow and a worker; a minute on a busy machine", "" if remote else "Prefect, ")
    environment, of_prefect = prefect_environment(remote or api_on(prefect_port)), list[Supervised]()
    if remote:
        require_server(remote)
    else:
        require_free(prefect_port, "PREFECT_PORT")
        environment[OF_CLIENTS] = own_password() if with_password else ""
        of_prefect.append(server_part(prefect_port, environment[OF_CLIENTS]))
    with (
        nullcontext() if remote else known(api_on(prefect_port)),
        _running([*of_prefect, *_mlflow_servers(mlflow_port)]) as servers,
    ):
        logger.info("putting the deployments of prefect.yaml on the server")
        command = [sys.executable, "-m", "flows", "deploy", *([] if remote else ["--restarted"])]
        if code := subprocess.run(command, env=environment, check=False).returncode:
            sys.exit(code)  # its own lines say why
        page = without_password(environment["PREFECT_API_URL"]).removesuffix("/api")
        mlflow = address(mlflow_port)
        if not remote:
            _say_who_may_enter(environment[OF_CLIENTS])
        logger.info("start a training or a promotion: %s/deployments", page)
        logger.info("what runs, and what came of it: %s/runs", page)
        logger.info("compare the runs in MLflow: %s", comparison(mlflow_port))
        logger.info("Ctrl-C ends everything")
        keep_working(worker_part("worker", POOL, {**environment, MLFLOW_UI: mlflow}), servers)


def worker_part(name: str, pool: str, environment: Mapping[str, str], *options: str) -> Supervised:
    """A worker that runs the runs of a pool as processes in this clone."""
    start = [sys.executable, "-m", "flows.prefect_app", "worker", "start"]
    command = [*start, "--pool", pool, "--type", "process", *options]
    started_by = {STARTED_BY: str(os.getpid())}
    return Supervised(name="worker", command=command, environment={**environment, **started_by}, log=log_path(name))


def own_password() -> str:
    """The password of this clone's Prefect server, made once. Raises ValueError if others may know it."""
    PASSWORD.parent.mkdir(parents=True, exist_ok=True)
    with (
        suppress(FileExistsError),
        os.fdopen(os.open(PASSWORD, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new,
    ):
        new.write(secrets.token_urlsafe(18))
    password = kept_password()
    if not password:
        raise ValueError(
            f"others may know or have written what is in {PASSWORD}; remove it, and a new password is made"
        )
    return password


def _say_who_may_enter(password: str) -> None:
    if password:
        logger.info("Prefect asks each browser once for the password %s, and commands for %s", password, OF_CLIENTS)
    else:
        logger.warning("without a password everybody who can log in to this machine can run commands as you here")


def show_mlflow(port: int) -> None:
    """Runs the MLflow UI alone, until interrupted."""
    logger.info("starting MLflow; half a minute on a busy machine")
    found = _mlflow_servers(port)
    if not found:
        raise ValueError(f"MLFLOW_TRACKING_URI names a server, which shows its runs itself: {address()}")
    with _running(found) as servers:
        logger.info("the runs side by side: %s", comparison(port))
        logger.info("MLflow at %s; Ctrl-C ends it", address(port))
        raise OSError(_obituary(_first_to_end(servers)))


def _mlflow_servers(port: int) -> list[Supervised]:
    if os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http"):
        return []
    require_free(port, "MLFLOW_PORT")
    open_store()  # a UI and a training that create it at the same time can break each other
    store = f"sqlite:///{store_file()}"
    own = ["--host", HOST, "--port", str(port), "--workers", "1", "--backend-store-uri", store]
    command = ["mlflow", "ui", *own, "--no-serve-artifacts"]  # it would write files from anybody into the clone
    return [
        Supervised(
            name="MLflow UI",
            command=[sys.executable, "-m", *command],
            environment={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            log=log_path("mlflow"),
            health=f"http://{HOST}:{port}/health",
        )
    ]


def keep_working(worker: Supervised, servers: Sequence[Running]) -> None:
    """Runs the worker beside the servers; raises OSError once one of them has ended."""
    worker.log.unlink(missing_ok=True)
    while True:
        started = time.monotonic()
        with _process(worker) as process:
            ended = _first_to_end([*servers, (worker, process)])
        if ended[0] is not worker or time.monotonic() - started < STEADY_S:
            raise OSError(f"{_obituary(ended)}; everything else was ended too")
        logger.warning("%s; starting another, what it ran is shown as crashed", _obituary(ended))


def _first_to_end(running: Sequence[Running]) -> Running:
    """Waits until a part has ended."""
    while True:
        for part, process in running:
            if process.poll() is not None:
                return part, process
        time.sleep(WATCH_S)


def _obituary(ended: Running) -> str:
    part, process = ended
    return f"the {part.name} ended with code {process.returncode}, see {part.log}"


@contextmanager
def _running(servers: Sequence[Supervised]) -> Iterator[list[Running]]:
    """Starts servers, and waits until all are up; ends them with the block, the last one first."""
    with ExitStack() as stack:
        running: list[Running] = []
        for server in servers:
            server.log.unlink(missing_ok=True)
            running.append((server, stack.enter_context(_process(server))))
        for server, (_, process) in zip(servers, running, strict=True):
            await_health(process, server)
            logger.info("the %s is up", server.name)
        yield running


@contextmanager
def _process(part: Supervised) -> Iterator[subprocess.Popen[str]]:
    """The part's process. At the end it is asked to end itself and its children; then its group is killed."""
    with part.log.open("a") as log, process_group(part.command, part.environment, log, GRACE_S) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


def require_free(port: int, variable: str) -> None:
    """Raises ValueError if no server can be started on a port."""
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
    """Raises OSError if nothing answers; ValueError if it wants another password or version, or is no Prefect server.

    Prefect finds the server's password or key in `PREFECT_API_AUTH_STRING` or `PREFECT_API_KEY`.
    """
    from httpx import HTTPError, HTTPStatusError
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    shown = without_password(api_url)
    none = ValueError(f"PREFECT_API_URL {shown} is no Prefect server; it should end in /api")
    try:
        with (
            temporary_settings({PREFECT_API_URL: api_url}),
            get_client(httpx_settings={"timeout": ANSWER_S}, sync_client=True) as client,
        ):
            found = str(client.api_version())
    except HTTPStatusError as fault:
        if fault.response.status_code in (401, 403):
            remedy = f"set {OF_CLIENTS} to its password, or PREFECT_API_KEY to a key of yours"
            raise ValueError(f"the Prefect server at {shown} wants to know who asks; {remedy}") from fault
        raise none from fault
    except (HTTPError, OSError) as fault:
        said = without_password(str(fault))
        raise OSError(
            f"no Prefect server answers at PREFECT_API_URL {shown} ({said}); start it there, correct the address, or "
            "unset PREFECT_API_URL for a server on this machine"
        ) from fault
    except ValueError as fault:
        raise none from fault
    ours = version("prefect")
    if found.split(".")[:2] != ours.split(".")[:2]:
        raise ValueError(
            f"the server at PREFECT_API_URL {shown} is Prefect {found}, and this project has {ours}; run the same "
            "minor version on both sides"
        )
