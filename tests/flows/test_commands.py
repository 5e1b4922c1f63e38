"""A stage's command as a task: its lines, its time limit, what is tried again, and what a flow is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect import flow

from flows.pipeline import StageFailed, StageUnavailable, expendable, run_command

# Stands in for a stage: counts its attempts, then does what its argument says.
STAGE = """
import pathlib, sys, time

attempts = pathlib.Path("attempts")
attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
print("attempt", len(attempts.read_text()), flush=True)
codes = [int(code) for code in sys.argv[2].split(",")]
code = codes[min(len(attempts.read_text()), len(codes)) - 1]
if code < 0:
    time.sleep(600)
sys.exit(code)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_params: Callable[..., None]) -> Path:
    """A folder whose own `python -m flows` is the stand-in."""
    monkeypatch.chdir(tmp_path)
    write_params(tmp_path, {})
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").touch()
    (tmp_path / "flows" / "__main__.py").write_text(STAGE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path


@flow
def stage(codes: str) -> None:
    run_command("train", codes)


def attempts(project: Path) -> int:
    return len((project / "attempts").read_text())


def test_a_stages_lines_are_logged_as_they_come(
    prefect_api: str, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="flows.pipeline"):
        stage("0")
    assert "attempt 1" in caplog.messages
    assert attempts(project) == 1


def test_a_bad_computation_is_not_repeated(prefect_api: str, project: Path) -> None:
    with pytest.raises(StageFailed, match="stage train failed with exit code 1; its own lines above say why"):
        stage("1")
    assert attempts(project) == 1


def test_what_may_work_later_is_tried_again(prefect_api: str, project: Path) -> None:
    stage("75,75,0")
    assert attempts(project) == 3  # operate.retries is 2


def test_what_still_does_not_work_fails(prefect_api: str, project: Path) -> None:
    with pytest.raises(StageUnavailable, match="exit code 75"):
        stage("75")
    assert attempts(project) == 3


def test_a_stage_that_takes_too_long_is_ended_once(
    prefect_api: str, project: Path, write_params: Callable[..., None]
) -> None:
    write_params(project, {"operate": {"timeouts_s": {"train": 1.5}}})
    with pytest.raises(
        StageFailed, match=r"train took longer than 1\.5 s .* raise operate\.timeouts_s\.train in params"
    ):
        stage("-1")
    assert attempts(project) == 1


@flow
def with_a_page(codes: str) -> None:
    with expendable("it goes without its page"):
        run_command("train", codes)


def test_what_a_flow_can_do_without_fails_with_a_warning(
    prefect_api: str, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="flows.pipeline"):
        state = with_a_page("1", return_state=True)
    assert state.is_completed()
    assert "it goes without its page: stage train failed with exit code 1; its own lines above say why" in caplog.text
