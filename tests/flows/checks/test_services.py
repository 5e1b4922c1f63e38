"""The doctor's checks of services, against real servers and stores that are not what they should be."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agent_r1 import tracking
from agent_r1.tracking.store import require_store
from flows.operation.checks import Status, mlflow, mlflow_port, mlflow_store, prefect, prefect_port

Answering = Callable[[str], int]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """Starts an HTTP server that answers everything with one text, and gives its port."""
    servers: list[ThreadingHTTPServer] = []

    def begin(text: str) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.server_port

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").touch()
    for name in ("DVC_ROOT", "MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_free_port(free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("PREFECT_PORT", str(port))
    assert prefect_port().message == f"{port} is free"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"2.20.1"', "is taken by Prefect 2.20.1, not by 3."),
        ("<html>Welcome</html>", "is taken by another program"),
    ],
)
def test_a_port_in_use_by_somebody_else(
    answering: Answering, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    port = answering(text)
    monkeypatch.setenv("PREFECT_PORT", str(port))
    found = prefect_port()
    assert found.status is Status.WARNING
    assert found.message.startswith(f"{port} {message}")
    assert f"make serve PREFECT_PORT={port + 1}" in found.remedy


def test_a_port_with_its_own_server(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import __version__

    monkeypatch.setenv("MLFLOW_PORT", str(answering(__version__)))
    assert mlflow_port().status is Status.OK


def test_no_server(project: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    found = prefect()
    assert found.status is Status.FAILED
    assert found.message.startswith(f"no Prefect server answers at PREFECT_API_URL {url}")


def test_a_server_of_another_version(project: Path, answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    port = answering('"2.20.1"')
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
    found = prefect()
    assert found.status is Status.FAILED
    assert "is Prefect 2.20.1, and this project has 3." in found.message
    assert found.remedy == "run the same minor version on both sides"


def test_something_else_than_a_server(project: Path, answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{answering('<html>')}")
    found = prefect()
    assert found.status is Status.FAILED
    assert "it should end in /api" in found.remedy


def test_a_flow_goes_through_a_server(project: Path, prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    found = prefect()
    assert (found.status, found.message) == (Status.OK, f"a flow went through {prefect_api}")


def test_a_run_goes_through_a_store(project: Path) -> None:
    assert mlflow().status is Status.OK
    assert not (project / ".tracking").exists()
    assert "not there yet" in mlflow_store().message


@pytest.fixture
def store(project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store that this process has not opened yet: MLflow looks at a schema once."""
    made = tmp_path_factory.mktemp("made")
    with monkeypatch.context() as patch:
        patch.setenv("DVC_ROOT", str(made))
        with tracking.start("ppo", {"variant": "ppo"}, {}):
            pass
    shutil.copytree(made / ".tracking", project / ".tracking")
    return project / ".tracking" / "mlflow.db"


def test_a_store_that_opens(store: Path) -> None:
    assert mlflow_store().message == str(store)


def test_a_store_of_another_schema(store: Path) -> None:
    with sqlite3.connect(store) as database:
        database.execute("UPDATE alembic_version SET version_num = 'feedfacefeed'")
    found = mlflow_store()
    assert found.status is Status.FAILED
    assert "was written by another version of MLflow" in found.message
    assert "feedfacefeed" in found.message
    assert f"mlflow db upgrade sqlite:///{store}" in found.remedy


def test_a_store_that_is_no_database(store: Path) -> None:
    store.write_bytes(b"half a page" * 1000)
    found = mlflow_store()
    assert found.status is Status.FAILED
    assert "cannot be opened" in found.message
    assert "move it away" in found.remedy


def test_a_tracking_server_that_is_down(
    project: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")  # to be put back
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ValueError, match=r"MLFLOW_TRACKING_URI .* cannot be used .*; start the server there"):
        require_store()
