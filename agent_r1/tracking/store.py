"""Where MLflow keeps things, and whether that can be used."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1 import files
from agent_r1.harmless import without_password
from agent_r1.params import tracking_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "agent_r1"
PASSING = {"TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"}  # MLflow's error codes
QUIET = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
}
IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # seconds


def open_store() -> tuple[MlflowClient, str]:
    """A client and the experiment's id; both are created under a file lock, which parallel stages wait for.

    A store that cannot be used for now raises what `passing_fault` knows, here and at every call of the client.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)  # mlflow reads them when it is imported
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    with locked("lock"):
        client = MlflowClient(store_uri())  # creates or checks the tables
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return client, found.experiment_id
        of_a_file = None if _server() else (tracking_folder() / "artifacts").as_uri()
        return client, client.create_experiment(EXPERIMENT, of_a_file)


def passing_fault(fault: BaseException) -> ConnectionError | None:
    """What MLflow says of a store that cannot be used for now, as one message; None where the fault is another one.

    A server that does not answer or is overloaded, a database that is locked or away: MLflow has an exception of one
    class for them and for what is asked wrongly.
    """
    if "mlflow" not in sys.modules:
        return None
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import OperationalError

    code = fault.error_code if isinstance(fault, MlflowException) else ""
    # MLflow gives a request that ended without an answer no code of its own.
    unanswered = code == "INTERNAL_ERROR" and isinstance(fault.__context__, OSError)
    if not (unanswered or code in PASSING or isinstance(fault, OperationalError)):
        return None
    return ConnectionError(
        f"MLflow's store {without_password(store_uri())} cannot be used for now ({_first_line(fault)}); see that it is "
        "up and that nothing locks it"
    )


def store_file() -> Path:
    """The store of a project without a tracking server."""
    return tracking_folder() / "mlflow.db"


def store_uri() -> str:
    """The store of this process."""
    return _server() or f"sqlite:///{store_file()}"


def locked(name: str) -> AbstractContextManager[None]:
    """Holds a lock of this project's clone on this machine; the kernel frees it when the process ends."""
    return files.locked(tracking_folder() / name)


def require_store() -> str:
    """Opens the store that stages write to, and says what it is; one that is not there yet is not made.

    A tracking server gets ten seconds in place of MLflow's minutes, in this process from now on. Raises ValueError,
    whose remedy follows the first semicolon, if the store cannot be opened: another schema, no file of SQLite's, a
    server that does not answer.
    """
    server, file = _server(), store_file()
    if not server and not file.exists():
        return f"{file} is not there yet, the first training makes it"
    os.environ.update(IMPATIENT)
    try:
        open_store()
    except Exception as fault:  # of MLflow, SQLAlchemy, Alembic or SQLite: whoever meets the damage first
        raise ValueError(_explained(server, file, _first_line(fault))) from fault
    return without_password(server) or str(file)


def _server() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", "")


def _first_line(fault: BaseException) -> str:
    return without_password(str(fault).strip().splitlines()[0])


def _explained(server: str, file: Path, said: str) -> str:
    if server:
        meant = f"MLFLOW_TRACKING_URI {without_password(server)}"
        return f"{meant} cannot be used ({said}); start the server there, or unset the variable"
    if "schema" in said or "revision" in said:
        return (
            f"{file} was written by another version of MLflow ({said.partition(' Take a backup')[0]}); "
            f"copy it, then `mlflow db upgrade sqlite:///{file}`, or install the MLflow that wrote it, if that is newer"
        )
    return f"{file} cannot be opened ({said}); move it away, and the next training makes a new one"
