"""Where MLflow keeps things, and whether that can be used."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from filelock import FileLock

from agent_r1.params.places import tracking_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException


EXPERIMENT = "agent_r1"
PASSING = {"TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"}  # MLflow's error codes
QUIET = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
}


def open_store() -> tuple[MlflowClient, str]:
    """A client and the experiment's id; both are created under a file lock, which parallel stages wait for.

    Raises:
        ConnectionError: the store cannot be used for now; every call of the client raises the same.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)  # mlflow reads them when it is imported
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    server = os.environ.get("MLFLOW_TRACKING_URI")
    uri = server or f"sqlite:///{store_file()}"
    with locked("lock"), passing_faults(uri):
        client = cast(MlflowClient, _Client(MlflowClient(uri), uri))  # creates or checks the tables
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return client, found.experiment_id
        return client, client.create_experiment(
            EXPERIMENT, None if server else (tracking_folder() / "artifacts").as_uri()
        )


@contextmanager
def passing_faults(uri: str) -> Iterator[None]:
    """Turns what MLflow says of a store that cannot be used for now into a ConnectionError; other faults stay.

    A server that does not answer or is overloaded, a database that is locked or away: MLflow has an exception of one
    class for them and for what is asked wrongly.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import OperationalError

    try:
        yield
    except (MlflowException, OperationalError) as fault:
        if isinstance(fault, MlflowException) and fault.error_code not in PASSING and not _no_answer(fault):
            raise
        said = str(fault).strip().splitlines()[0]
        raise ConnectionError(
            f"MLflow's store {uri} cannot be used for now ({said}); see that it is up and that nothing locks it"
        ) from fault


def _no_answer(fault: MlflowException) -> bool:
    """Whether a request ended without an answer; MLflow gives such a fault no code of its own."""
    return fault.error_code == "INTERNAL_ERROR" and isinstance(fault.__context__, OSError)


class _Client:
    """An `MlflowClient` whose calls raise ConnectionError where the store cannot be used for now."""

    def __init__(self, client: MlflowClient, uri: str) -> None:
        self._client, self._uri = client, uri

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return passing_faults(self._uri)(found) if callable(found) else found


def store_file() -> Path:
    """The store of a project without a tracking server."""
    return tracking_folder() / "mlflow.db"


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds a lock of this project's clone on this machine; the kernel frees it when the process ends."""
    tracking_folder().mkdir(parents=True, exist_ok=True)
    with FileLock(tracking_folder() / name):
        yield


IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # seconds


def require_store() -> str:
    """Opens the store that stages write to, and says what it is; one that is not there yet is not made.

    A tracking server gets ten seconds in place of MLflow's minutes, in this process from now on.

    Raises:
        ValueError: it cannot be opened: another schema, no file of SQLite's, a server that does not answer; the
            remedy follows the first semicolon.
    """
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    file = store_file()
    if not server and not file.exists():
        return f"{file} is not there yet, the first training makes it"
    os.environ.update(IMPATIENT)
    try:
        open_store()
    except Exception as fault:  # of MLflow, SQLAlchemy, Alembic or SQLite: whoever meets the damage first
        raise ValueError(_explained(server, file, fault)) from fault
    return server or str(file)


def _explained(server: str, file: Path, fault: Exception) -> str:
    said = str(fault.__cause__ if isinstance(fault, ConnectionError) else fault).strip().splitlines()[0]
    if server:
        return f"MLFLOW_TRACKING_URI {server} cannot be used ({said}); start the server there, or unset the variable"
    if "schema" in said or "revision" in said:
        return (
            f"{file} was written by another version of MLflow ({said.partition(' Take a backup')[0]}); "
            f"copy it, then `mlflow db upgrade sqlite:///{file}`, or install the MLflow that wrote it, if that is newer"
        )
    return f"{file} cannot be opened ({said}); move it away, and the next training makes a new one"
