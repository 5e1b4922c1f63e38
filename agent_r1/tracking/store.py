"""Where MLflow keeps things."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "agent_r1"
QUIET = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
}


def open_store() -> tuple[MlflowClient, str]:
    """A client and the experiment's id; both are created under a file lock, which parallel stages wait for."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)  # mlflow reads them when it is imported
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    server = os.environ.get("MLFLOW_TRACKING_URI")
    with locked("lock"):
        client = MlflowClient(server or f"sqlite:///{store_file()}")  # creates or checks the tables
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return client, found.experiment_id
        return client, client.create_experiment(
            EXPERIMENT, None if server else (tracking_folder() / "artifacts").as_uri()
        )


def project_root() -> Path:
    """The nearest folder from the current one upwards that holds params.yaml."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "params.yaml").exists():
            return folder
    raise ValueError(f"no params.yaml in {here} or above it; run from inside the project")


def tracking_folder() -> Path:
    """Where MLflow, Prefect and the locks of this project's clone keep their files."""
    return Path(os.environ.get("DVC_ROOT") or project_root()).absolute() / ".tracking"


def store_file() -> Path:
    """The store of a project without a tracking server."""
    return tracking_folder() / "mlflow.db"


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds a lock of this project's clone on this machine; the kernel frees it when the process ends."""
    path = tracking_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
