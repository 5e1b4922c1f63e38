"""The doctor's checks of the project, on projects that lack something."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from flows.operation.checks import (
    NotTried,
    Status,
    complaint,
    dvc_project,
    dvc_remote,
    parameters,
    remote_finding,
    settings_or_not_tried,
    tracking_folder,
    versions,
    versions_finding,
)

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
    for name in ("DVC_ROOT", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return folder


def add_remote(project: Path, **settings: str) -> None:
    config = (project / ".dvc" / "config").read_text().replace("[core]", "[core]\n remote = storage")
    lines = [f" {key} = {value}" for key, value in settings.items()]
    (project / ".dvc" / "config").write_text("\n".join([config, "['remote \"storage\"']", *lines]) + "\n")


def test_the_versions_here_are_in_range() -> None:
    assert versions().status is not Status.FAILED


@pytest.mark.parametrize(
    ("there", "status", "message"),
    [
        ({"prefect": "3.7.7", "sqlalchemy": "2.0.44"}, Status.OK, "as pinned: prefect 3.7.7"),
        ({"prefect": "3.7.9", "sqlalchemy": "2.0.44"}, Status.WARNING, "prefect 3.7.9 (tested with ==3.7.7)"),
        ({"prefect": "3.7.7", "sqlalchemy": "2.1.0"}, Status.FAILED, "sqlalchemy 2.1.0 (<2.1,>=2.0 is asked for)"),
        ({"sqlalchemy": "2.0.44"}, Status.FAILED, "prefect is missing (>=3.7.7 is asked for)"),
    ],
)
def test_versions(there: dict[str, str], status: Status, message: str) -> None:
    asked = [Requirement("prefect>=3.7.7"), Requirement("sqlalchemy>=2.0,<2.1")]
    found = versions_finding(asked, [Requirement("prefect==3.7.7")], there)
    assert (found.status, found.message) == (status, message)


def test_parameters_that_are_refused(project: Path) -> None:
    assert parameters().status is Status.OK
    (project / "params.yaml").write_text("train: {iterations: none}\n")
    found = parameters()
    assert found.status is Status.FAILED
    assert "params.yaml" in found.message
    with pytest.raises(NotTried, match=r"params\.yaml is refused"):
        settings_or_not_tried()


def test_no_parameters(project: Path) -> None:
    (project / "params.yaml").unlink()
    assert "run from the project's root" in parameters().message


def test_a_tracking_folder_that_cannot_be_written_to(project: Path) -> None:
    assert tracking_folder().status is Status.OK
    (project / ".tracking").rmdir()
    (project / ".tracking").write_text("in its place")
    found = tracking_folder()
    assert (found.status, "cannot be written to: File exists" in found.message) == (Status.FAILED, True)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB with nothing free."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting takes another user")
    try:
        (folder / ".tracking").mkdir()
        with suppress(OSError), (folder / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(b"0" * 4096)
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(full_disk: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_ROOT", str(full_disk))
    found = tracking_folder()
    assert (found.status, "cannot be written to: No space left" in found.message) == (Status.FAILED, True)
    assert "free some disk space" in found.remedy


def test_a_folder_that_dvc_does_not_know(project: Path) -> None:
    assert dvc_project().status is Status.OK
    shutil.rmtree(project / ".dvc")
    found = dvc_project()
    assert found.status is Status.FAILED
    assert "not inside of a DVC repository" in found.message


def test_a_graph_that_dvc_refuses(project: Path) -> None:
    (project / "dvc.yaml").write_text("stages: {train: {comand: python}}\n")
    found = dvc_project()
    assert found.status is Status.FAILED
    assert "dvc.yaml" in found.message


def test_no_remote(project: Path) -> None:
    found = dvc_remote()
    assert found.status is Status.WARNING
    assert "there is none" in found.message
    assert "dvc remote add -d storage URL" in found.remedy


def test_a_remote_on_a_disk_that_is_not_mounted(project: Path, tmp_path: Path) -> None:
    add_remote(project, url=str(tmp_path / "storage"), verify="true")
    found = dvc_remote()
    assert found.status is Status.WARNING
    assert found.message.endswith("storage, which does not exist")
    (tmp_path / "storage").mkdir()
    found = dvc_remote()
    assert (found.status, found.message.endswith("answers")) == (Status.OK, True), found.message


def test_a_remote_that_does_not_answer(
    project: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (project / "data").write_text("rows")
    (project / "data.dvc").write_text("outs:\n- md5: df347a373b8f92aa0ae3dd920a5ec2f6\n  hash: md5\n  path: data\n")
    add_remote(project, url="s3://agents/any", verify="true", endpointurl=f"http://127.0.0.1:{free_port()}")
    found = dvc_remote()
    assert found.status is Status.FAILED
    assert "cannot be used: unexpected error - Could not connect to the endpoint URL" in found.message


def compared(stdout: str, stderr: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], returncode=code, stdout=stdout, stderr=stderr)


def test_a_remote_that_takes_corrupted_objects_for_good() -> None:
    found = remote_finding("storage, s3://agents,", False, compared("{}"))
    assert (found.status, found.remedy) == (Status.WARNING, "dvc remote modify storage verify true")


def test_what_waits_to_be_pushed() -> None:
    found = remote_finding("storage, s3://agents,", True, compared('{"a": "new", "b": "new", "c": "deleted"}'))
    assert (found.status, found.message) == (Status.OK, "storage, s3://agents, answers; 2 files wait for `dvc push`")


def test_the_complaint_is_the_error_without_its_frame() -> None:
    said = "WARNING: old\nERROR: unexpected error - no bucket\n\nHaving any troubles? Hit us up at https://dvc.org"
    assert complaint(compared("", said, 255)) == "unexpected error - no bucket"
    assert complaint(compared("", "", 3)) == "exit code 3"
