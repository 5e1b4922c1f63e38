"""Checks of the services: ports, a Prefect round trip, an MLflow round trip, and MLflow's own store."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from importlib.metadata import version

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, temporary_settings

from agent_r1 import tracking
from agent_r1.tracking.health import require_store
from flows.checks.finding import Finding, Status
from flows.running.server import ANSWER_S, HOST, prefect_server, require_server, served_version


def prefect_port() -> Finding:
    """The port that `make serve` gives Prefect."""
    return _port("Prefect", "prefect", "PREFECT_PORT", 4200, "api/admin/version")


def mlflow_port() -> Finding:
    """The port that `make serve` and `make ui` give MLflow."""
    return _port("MLflow", "mlflow", "MLFLOW_PORT", 5000, "version")


def _port(name: str, distribution: str, variable: str, default: int, page: str) -> Finding:
    """Free, or with the server of that name on it."""
    check, port = f"{distribution} port", int(os.environ.get(variable, default))
    if not _listens(port):
        return Finding(check=check, status=Status.OK, message=f"{port} is free")
    try:
        found = served_version(f"http://{HOST}:{port}/{page}")
    except (OSError, ValueError):
        found = ""
    if found == version(distribution):
        return Finding(check=check, status=Status.OK, message=f"{port} is answered by {name} {found}")
    who = f"{name} {found}, not by {version(distribution)}" if found else "another program"
    message = f"{port} is taken by {who}"
    remedy = f"end it (`lsof -i :{port}` names it), or make serve {variable}={port + 1}"
    return Finding(check=check, status=Status.WARNING, message=message, remedy=remedy)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(ANSWER_S)
        return probe.connect_ex((HOST, port)) == 0


def prefect() -> Finding:
    """A flow on the server of PREFECT_API_URL, or on a temporary one."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        with _temporary_server() as temporary:
            return _round_trip(temporary, "a temporary server")
    try:
        require_server(url)
    except (OSError, ValueError) as fault:
        message, _, remedy = str(fault).partition("; ")
        return Finding(check="prefect", status=Status.FAILED, message=message, remedy=remedy)
    return _round_trip(url, url)


@contextmanager
def _temporary_server() -> Iterator[str]:
    """A server that leaves nothing in the project's history."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), prefect_server() as url:
        yield url


def _round_trip(url: str, server: str) -> Finding:
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        state: State[None] = _nothing(return_state=True)
        assert state.state_details.flow_run_id
        stored = client.read_flow_run(state.state_details.flow_run_id)
    if stored.state is None or not stored.state.is_completed():
        message = f"{server} keeps a flow that did nothing as {stored.state_name}"
        remedy = "look at the server's log, .tracking/prefect/server.log"
        return Finding(check="prefect", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="prefect", status=Status.OK, message=f"a flow went through {server}")


@flow(name="doctor")
def _nothing() -> None:
    """What a flow does that only its server matters to."""


def mlflow() -> Finding:
    """A run in a store of its own: written, and read again."""
    with tempfile.TemporaryDirectory() as folder, _store_in(folder):
        with tracking.start("doctor", {"variant": "doctor"}, {}) as run:
            run.log({"doctor/steps": 1.0}, step=0)
        found = tracking.resume(run.run_id)
    if found is None:
        message, remedy = "a run that was written is not there", "install the pinned mlflow again"
        return Finding(check="mlflow", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="mlflow", status=Status.OK, message="a run went through a temporary store")


def mlflow_store() -> Finding:
    """The project's own store: that it opens, in this MLflow's schema."""
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    try:
        where = require_store()
    except ValueError as fault:
        message, _, remedy = str(fault).partition("; ")
        return Finding(check="mlflow store", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="mlflow store", status=Status.OK, message=where or f"{server} answers")


@contextmanager
def _store_in(folder: str) -> Iterator[None]:
    """Has MLflow keep everything in a folder."""
    changed = {"DVC_ROOT": folder, "MLFLOW_TRACKING_URI": ""}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
