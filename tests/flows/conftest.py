"""A real Prefect server, started once, and small scripts that are whole processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness

ROOT = Path(__file__).parents[2]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[str]:
    """The API URL of a Prefect server of the tests' own."""
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield PREFECT_API_URL.value()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `python ARGUMENTS` in tmp_path with the project importable; kills it after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start_process(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**inherited, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start_process
    for process in processes:
        process.kill()
        process.communicate()
