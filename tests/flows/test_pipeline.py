"""The pipeline on a small DVC project: order, cached stages, failures, a cancel."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline import StageFailed, ordered, pipeline, reproduce, stages

TWO_STAGES = """
stages:
  second:
    cmd: cp first.txt second.txt && echo second >> ../order.txt
    deps: [first.txt]
    outs: [second.txt]
  first:
    cmd: cp source.txt first.txt && echo first >> ../order.txt
    deps: [source.txt]
    outs: [first.txt]
"""


@pytest.fixture(scope="module")
def empty_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], check=True, cwd=folder)
    return folder


@pytest.fixture
def project(tmp_path: Path, empty_project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(empty_project, folder)
    monkeypatch.chdir(folder)
    (folder / "source.txt").write_text("1")
    (folder / "dvc.yaml").write_text(TWO_STAGES)
    return folder


def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Runs the pipeline; the name of every task's last state, by stage."""
    seen: dict[str, str] = {}

    def spied(stage: str) -> None:
        seen[stage] = reproduce(stage, return_state=True).name

    with monkeypatch.context() as patch:
        patch.setattr("flows.pipeline.reproduce", spied)
        pipeline()
    return seen


def test_stages_run_in_dvcs_order_and_are_cached_afterwards(
    prefect_api: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert states(monkeypatch) == {"first": "Completed", "second": "Completed"}
    assert (project.parent / "order.txt").read_text() == "first\nsecond\n"
    assert states(monkeypatch) == {"first": "Cached", "second": "Cached"}
    assert (project.parent / "order.txt").read_text() == "first\nsecond\n"


def test_a_failed_stage_ends_the_pipeline(prefect_api: str, project: Path) -> None:
    (project / "dvc.yaml").write_text(TWO_STAGES.replace("cp source.txt", "exit 3; cp source.txt"))
    with pytest.raises(StageFailed, match="stage first failed with exit code"):
        pipeline()
    assert not (project / "second.txt").exists()


def test_files_that_dvc_refuses_are_a_users_fault(project: Path) -> None:
    (project / "dvc.yaml").write_text("stages: {first: {command: ls}}")
    with pytest.raises(ValueError, match=r"dvc dag failed: .*dvc\.yaml"):
        stages()


def test_a_stage_comes_after_all_it_depends_on() -> None:
    """c needs a and b, b needs a, d stands alone: only a, b, c in this order."""
    dot = 'strict digraph {\n"c";\n"d";\n"a" -> "c";\n"b" -> "c";\n"a" -> "b";\n}\n'
    order = ordered(dot)
    assert [stage for stage in order if stage != "d"] == ["a", "b", "c"]
    assert "d" in order


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_cancel_leaves_no_process(
    prefect_api: str, project: Path, start: Any, number: signal.Signals, code: int
) -> None:
    fifo = project.parent / "started"
    subprocess.run(["mkfifo", str(fifo)], check=True)
    (project / "dvc.yaml").write_text(f"stages: {{long: {{cmd: 'echo $$ > {fifo}; sleep 600; true'}}}}")
    process = start(
        "-c",
        f"import os; os.chdir({str(project)!r}); from flows.pipeline import main; main()",
        PREFECT_API_URL=prefect_api,
    )
    shell = int(fifo.read_text())  # blocks until the stage runs
    process.send_signal(number)
    process.communicate()
    assert process.returncode == code
    assert not Path(f"/proc/{shell}").exists()
