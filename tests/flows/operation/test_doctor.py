"""The doctor as a command, and what it makes of examinations that go wrong."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from flows.operation import doctor
from flows.operation.checks import Finding, NotTried, Status, found_by
from flows.operation.doctor import EXAMINATIONS, examine, made_here, table

Start = Callable[..., subprocess.Popen[str]]


def healthy() -> Finding:
    return Finding(check="healthy", status=Status.OK, message="as it should be")


def broken_check() -> Finding:
    raise RuntimeError("no such device")


def waiting_check() -> Finding:
    raise NotTried("params.yaml is refused")


def test_a_check_that_raises_has_found_something() -> None:
    assert found_by(healthy).status is Status.OK
    broken, waiting = found_by(broken_check), found_by(waiting_check)
    assert (broken.check, broken.status, broken.message) == (
        "broken check",
        Status.FAILED,
        "RuntimeError: no such device",
    )
    assert (waiting.status, waiting.message) == (Status.WARNING, "not tried: params.yaml is refused")


def test_a_finding_that_is_not_ok_says_what_to_do() -> None:
    with pytest.raises(AssertionError, match="no remedy"):
        Finding(check="disk", status=Status.WARNING, message="nearly full")


def test_the_table_shows_what_to_do_below_what_was_found() -> None:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 PTH123
    console.print(table([healthy(), Finding(check="disk", status=Status.FAILED, message="full", remedy="free [some]")]))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[1:] == ["ok healthy as it should be", "failed disk full", "-> free [some]"]


def test_every_check_is_there() -> None:
    names = [check for _, checks in EXAMINATIONS.values() for check in checks]
    assert len(names) == len(set(names)) == 14


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(7)", "its process ended with 7: no word"),
        ("raise ImportError('libtorch.so: cannot open')", "its process ended with 1: ImportError: libtorch.so"),
        ("import os; os.abort()", "its process ended with -6"),
    ],
)
def test_a_library_that_does_not_survive_its_import_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    (tmp_path / "torch.py").write_text(source)
    code = str(Path(doctor.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), code]))
    [found] = examine(["machine"])
    assert (found.check, found.status) == ("machine", Status.FAILED)
    assert said in found.message
    assert "--examine machine" in found.remedy


def test_an_examination_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    code = str(Path(doctor.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), code]))
    monkeypatch.setattr(doctor, "TIME_LIMIT_S", 3.0)
    [found] = examine(["machine"])
    assert (found.check, found.message) == ("machine", "no answer within 3 s")


def test_findings_come_back_as_they_were_found(small_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = str(Path(doctor.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", code)
    monkeypatch.chdir(small_project)
    assert examine(["project"]) == made_here("project")


def test_the_command_fails_where_anything_failed(tmp_path: Path, small_project: Path, start: Start) -> None:
    (tmp_path / "params.yaml").write_text((small_project / "params.yaml").read_text())
    good = start("-m", "flows", "doctor", "--examine", "project", COLUMNS="200")
    output, errors = good.communicate(timeout=60)
    assert good.returncode == 0, errors
    assert "params.yaml is valid" in output

    with (tmp_path / "params.yaml").open("a") as file:
        file.write("trian: {}\n")
    bad = start("-m", "flows", "doctor", "--examine", "project", COLUMNS="200")
    output, _ = bad.communicate(timeout=60)
    assert bad.returncode == 1
    assert "trian" in output
    assert "correct params.yaml" in output


def test_a_report_is_plain_json(tmp_path: Path, small_project: Path, start: Start) -> None:
    (tmp_path / "params.yaml").write_text((small_project / "params.yaml").read_text())
    process = start("-m", "flows", "doctor", "--examine", "project", "--to", "found.json")
    assert process.wait(60) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["check"] for each in found] == ["versions", "parameters", "tracking folder"]
