"""What is replaced inside packages of others is as its replacement was written for, or is named with the remedy."""

import hashlib
import inspect
import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agent_r1 import replaced
from agent_r1.replaced import owner_of

ROOT = Path(__file__).parents[1]
# The beginnings of the SHA-256 of the parts' sources. After an upgrade: read what changed, mend the replacement, then
# put the new hash here, and the new version into agent_r1/replaced.py and pyproject.toml.
SOURCES = {
    replaced.DVC_OPEN: "c6471019",
    replaced.DVC_DUMP: "e5c82405",
    replaced.DVC_RUN_CACHE: "07e19294",
    replaced.MLFLOW_CHECK: "c7808bd5",
    replaced.MLFLOW_REPOSITORY: "48b0c4c0",
    replaced.MLFLOW_PAGE: "c1c48325",
    replaced.MLFLOW_RUN: "dd189709",
    **dict(zip(replaced.PREFECT_RESULTS, ("2ba919b2", "0bfbfb9b", "60a72337", "d7b9c445"), strict=True)),
    replaced.PREFECT_LIBRARY: "57c2f279",
    replaced.PREFECT_AUTOMATIONS: "f1183cea",
    **dict(zip(replaced.TORCH_SETS, ("5d3b08e2", "cd8eeae5"), strict=True)),
    replaced.TRANSFORMERS_READ: "75d2c48d",
}


def print_hashes() -> None:
    """In a process that has replaced nothing."""
    sources = [inspect.getsource(getattr(owner_of(part), part.path.rpartition(".")[2])) for part in SOURCES]
    sys.stdout.write(" ".join(hashlib.sha256(source.encode()).hexdigest()[:8] for source in sources))


@pytest.mark.slow  # a process that imports all
def test_replaced_parts_have_the_sources_that_their_replacements_were_written_for() -> None:
    command = [sys.executable, "-c", "from tests.test_replaced import print_hashes; print_hashes()"]
    hashes = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {str(part): source for part, source in zip(SOURCES, hashes, strict=True)} == {
        str(part): source for part, source in SOURCES.items()
    }


def test_packages_with_replaced_parts_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {name.partition("[")[0]: pin for name, _, pin in (line.partition("==") for line in project["dependencies"])}
    assert {part.package: part.version for part in SOURCES}.items() <= pins.items()


def test_owner_of_part_of_another_version_is_given_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    part = replaced.DVC_OPEN._replace(version="3.0.0")
    with caplog.at_level(logging.WARNING):
        owner_of(part)
        owner_of(part)
    [message] = caplog.messages
    assert "dvc.fs.LocalFileSystem.open, which agent_r1 replaces as dvc 3.0.0 has it; install that version" in message


@pytest.mark.parametrize("path", ["LocalFileSystem.unknown", "Unknown.open"])
def test_owner_of_missing_part_is_refused_with_the_remedy(path: str) -> None:
    with pytest.raises(ImportError, match=rf"dvc 3.67.1 has no dvc.fs.{path}, .*; install that version"):
        owner_of(replaced.DVC_OPEN._replace(path=path))
