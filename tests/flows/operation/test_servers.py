"""Servers on this machine and elsewhere: what is refused, and what the user is told to do."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import pytest

from agent_r1.tracking import store
from flows.operation.serving import require_free, require_server
from flows.processes import api_on
from tests.answering import answering


@contextmanager
def a_version(body: str) -> Iterator[str]:
    """The API URL of a server that answers every request with this body."""
    with answering(lambda _: (200, body.encode())) as url:
        yield f"{url}/api"


@contextmanager
def bound() -> Iterator[int]:
    """A port that is taken; nothing answers there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    with bound() as port:
        message = rf"port {port} of 127\.0\.0\.1 .*in use.*; end what listens there.* make serve MLFLOW_PORT={port + 1}"
        with pytest.raises(ValueError, match=message):
            require_free(port, "MLFLOW_PORT")
    require_free(port, "MLFLOW_PORT")


def test_a_patch_release_is_accepted() -> None:
    major, minor, _ = version("prefect").split(".")
    with a_version(json.dumps(f"{major}.{minor}.999")) as url:
        require_server(url)


def test_a_server_of_another_version_is_refused() -> None:
    ours = version("prefect")
    with (
        a_version(json.dumps("2.20.1")) as url,
        pytest.raises(ValueError, match=rf"{url} is Prefect 2\.20\.1, and this project has {ours}; run the same minor"),
    ):
        require_server(url)


def test_what_is_no_prefect_server_is_refused() -> None:
    with a_version("<html>") as url, pytest.raises(ValueError, match="is no Prefect server; it should end in /api"):
        require_server(url)


def test_a_server_that_does_not_answer_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        url = api_on(silent.getsockname()[1])
        with pytest.raises(OSError, match=rf"no Prefect server answers at PREFECT_API_URL {url} .*; start it there"):
            require_server(url.replace("://", "://me:secret@"))


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "http://127.0.0.1:5001"),
        ({"MLFLOW_TRACKING_URI": "sqlite:///x.db"}, "http://127.0.0.1:5001"),
        ({"MLFLOW_TRACKING_URI": "https://me:secret@mlflow.example"}, "https://mlflow.example"),
        ({"MLFLOW_TRACKING_URI": "http://a", "AGENT_R1_MLFLOW_UI": "http://b"}, "http://b"),
    ],
)
def test_where_a_browser_finds_mlflow(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], address: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert store.address(5001) == address
