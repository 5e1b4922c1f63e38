"""Servers of this machine, started and ended together: `agent-r1 serving`, or `make serve`."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from importlib.metadata import version
from urllib.parse import urlsplit

from agent_r1.harmless import without_password
from agent_r1.replaced import keep_results_own
from agent_r1.tracking.store import MLFLOW_UI, address, comparison, open_store, store_uri
from flows import apps, processes
from flows.stage import kept_password

POOL = "agent_r1"  # the work pool of prefect.yaml
ANSWER_S = 10.0  # for a server on this machine, or near it
GRACE_S = 40.0  # for the worker's runs to end their stages and to say so
STEADY_S = 20.0  # a worker that died sooner would only die again

logger = logging.getLogger(__name__)


def serve(prefect_port: int, mlflow_port: int, *, with_password: bool = True) -> None:
    """Runs a Prefect server with the deployments, a worker and the MLflow UI, until interrupted or a part dies.

    Both servers ask for the password of `own_password`, because every run that is created runs commands as this user.

    With `PREFECT_API_URL` no server is started; with an `MLFLOW_TRACKING_URI` on HTTP no MLflow UI. A worker that dies
    after `STEADY_S` is started again; its runs are ended, and shown as crashed.
    """
    remote = os.environ.get("PREFECT_API_URL")
    logger.info("starting %sMLflow and a worker; a minute on a busy machine", "" if remote else "Prefect, ")
    url = remote or processes.api_on(prefect_port)
    parts = list[processes.Supervised]()
    environment = processes.prefect_environment(url)
    password = own_password() if with_password else ""
    if remote:
        require_server(remote)
    else:
        environment[processes.OF_CLIENTS] = password
        parts.append(processes.server_part(claim(prefect_port, "prefect"), password))
    parts += _mlflow_servers(mlflow_port, password)
    with nullcontext() if remote else processes.known(url), processes.servers(parts, GRACE_S) as running:
        logger.info("putting the deployments of prefect.yaml on the server")
        command = [sys.executable, "-m", "flows", "deploy", *([] if remote else ["--restarted"])]
        if code := subprocess.run(command, env=environment, check=False).returncode:
            sys.exit(code)  # its own lines say why
        page = without_password(url).removesuffix("/api")
        if parts:
            _tell(password)
        logger.info("start a training or a promotion under Deployments, and see the results under Runs: %s", page)
        logger.info("compare the runs in MLflow: %s", comparison(mlflow_port))
        logger.info("Ctrl-C ends everything")
        keep_working(worker_part("worker", POOL, {**environment, MLFLOW_UI: address(mlflow_port)}), running)


def worker_part(name: str, pool: str, environment: Mapping[str, str], *options: str) -> processes.Supervised:
    """A worker that runs the runs of a pool as processes in this clone."""
    start = [sys.executable, "-m", "flows.apps", "worker", "start", "--type", "process"]
    command = [*start, "--pool", pool, *options]
    return processes.Supervised(name="worker", command=command, environment=environment, log=processes.log_path(name))


def own_password() -> str:
    """The password of this clone's Prefect server, made once. Raises ValueError if others may know it."""
    processes.PASSWORD.parent.mkdir(0o700, parents=True, exist_ok=True)
    with (
        suppress(FileExistsError),
        os.fdopen(os.open(processes.PASSWORD, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new,
    ):
        new.write(secrets.token_urlsafe(18))
    password = kept_password()
    if not password:
        raise ValueError(f"others may know or have written {processes.PASSWORD}; remove it, and a new password is made")
    return password


def show_mlflow(port: int, *, with_password: bool = True) -> None:
    """Runs the MLflow UI alone, until interrupted."""
    logger.info("starting MLflow; half a minute on a busy machine")
    password = own_password() if with_password else ""
    parts = _mlflow_servers(port, password)
    if not parts:
        raise ValueError(f"MLFLOW_TRACKING_URI names a server, which shows its runs itself: {address()}")
    with processes.servers(parts, GRACE_S) as running:
        _tell(password)
        logger.info("the runs side by side: %s", comparison(port))
        logger.info("MLflow at %s; Ctrl-C ends it", address(port))
        raise OSError(processes.first_to_end(running)[1])


def _tell(password: str) -> None:
    if password:
        sentence = (
            "browsers ask for the password %s: Prefect takes it alone, MLflow with any user; commands read %s and %s"
        )
        logger.info(sentence, password, processes.OF_CLIENTS, apps.PASSWORD)
    else:
        logger.warning("without a password everybody who can log in to this machine can run commands as you here")


def _mlflow_servers(port: int, password: str) -> list[processes.Supervised]:
    if os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http"):
        return []
    listening = claim(port, "mlflow")
    client, experiment = open_store()  # a UI and a training that create it at the same time can break each other
    return [
        processes.Supervised(
            name="MLflow UI",
            command=processes.uvicorn("mlflow", listening, "--lifespan", "off", "--ws", "none"),
            environment={
                **os.environ,
                processes.STARTED_BY: str(os.getpid()),
                "_MLFLOW_SERVER_FILE_STORE": store_uri(),  # the names by which `mlflow server` tells its own app
                apps.HOME: client.get_experiment(experiment).artifact_location,
                apps.FIRST: urlsplit(comparison()).fragment,
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                apps.PASSWORD: password,
            },
            log=processes.log_path("mlflow"),
            health=f"http://{processes.HOST}:{port}/health",
            listening=listening,
        )
    ]


def keep_working(worker: processes.Supervised, others: Sequence[processes.Running]) -> None:
    """Runs the worker beside servers; raises OSError once one of them has ended, or the worker died at once."""
    worker.log.unlink(missing_ok=True)
    while True:
        started = time.monotonic()
        with processes.running(worker, GRACE_S) as working:
            ended, reason = processes.first_to_end([*others, working])
        if ended is not worker or time.monotonic() - started < STEADY_S:
            raise OSError(f"{reason}; everything else was ended too")
        logger.warning("%s; starting another, its runs are shown as crashed", reason)


def claim(port: int, server: str) -> socket.socket:
    """The socket of a server, prefect or mlflow, on a port. Raises ValueError if none can be started there."""
    try:
        return processes.listen(port)
    except OSError as fault:
        used = f"port {port} of {processes.HOST} cannot be used ({fault.strerror})"
        remedy = f"end the program that listens there, or choose another: `agent-r1 serving --{server}-port {port + 1}`"
        raise ValueError(f"{used}; {remedy}") from fault


def require_server(api_url: str) -> None:
    """OSError if nothing answers; ValueError for another password or major version, or no Prefect server.

    Another minor version is warned of. From then on this process reads no result that it has not made itself.
    """
    from httpx import HTTPError, HTTPStatusError
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    keep_results_own()
    server = without_password(api_url)
    installed = version("prefect")
    try:
        with (
            temporary_settings({PREFECT_API_URL: api_url}),
            get_client(httpx_settings={"timeout": ANSWER_S}, sync_client=True) as client,
        ):
            served_version = str(client.api_version())
    except (HTTPStatusError, ValueError) as fault:
        if isinstance(fault, HTTPStatusError) and fault.response.status_code in (401, 403):
            remedy = f"set {processes.OF_CLIENTS} to its password, or PREFECT_API_KEY to a key of yours"
            raise ValueError(f"the Prefect server at {server} wants to know who asks; {remedy}") from fault
        raise ValueError(f"PREFECT_API_URL {server} is no Prefect server; it should end in /api") from fault
    except (HTTPError, OSError) as fault:
        problem = without_password(str(fault))
        remedy = "start it there, correct the address, or unset PREFECT_API_URL for a server on this machine"
        raise OSError(f"no Prefect server answers at PREFECT_API_URL {server} ({problem}); {remedy}") from fault
    unlike = f"the server at PREFECT_API_URL {server} is Prefect {served_version}, and this project has {installed}"
    if served_version.split(".")[0] != installed.split(".")[0]:
        raise ValueError(f"{unlike}; run the same major version on both sides")
    if served_version.split(".")[1] != installed.split(".")[1]:
        logger.warning("%s; where they misunderstand each other, run the same minor version on both sides", unlike)
