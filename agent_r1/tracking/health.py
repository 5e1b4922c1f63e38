"""Whether MLflow's store can be used, said so that a user knows what to do."""

from __future__ import annotations

import os
from pathlib import Path

from agent_r1.tracking.store import open_store, store_file

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
