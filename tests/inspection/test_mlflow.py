"""The page where MLflow shows it: in a frame of its own, from which its script may reach nothing else."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from playwright.sync_api import Browser, expect

from agent_r1 import tracking
from agent_r1.inspection.stored import Shown, When
from agent_r1.inspection.viewer import page
from flows.processes import Supervised, await_health

ROOT = Path(__file__).parents[2]
PATIENCE_MS = 60_000


@pytest.fixture
def project(tmp_path: Path, lay_store: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tracking store of its own."""
    lay_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


@pytest.fixture
def run_id(project: Path, make_shown: Callable[..., Shown], words: Any) -> str:
    """A run that has a page of two trajectories."""
    about: dict[str, Any] = {"facts": [], "weights": {}, "notes": []}
    pair = [make_shown(when=When.BEFORE, answer="Veld"), make_shown(when=When.AFTER)]
    with tracking.start("ppo", {}, {}) as run:
        run.text(page("ppo", about, [pair], words.decode), "viewer.html")
    return str(run.run_id)


@pytest.fixture
def mlflow_ui(project: Path, run_id: str, free_port: Callable[[], int]) -> Iterator[str]:
    """Where `make serve` would show MLflow, of a store that has the run."""
    port = free_port()
    command = [sys.executable, "-m", "flows", "serving", "--only-mlflow", "--mlflow-port", str(port)]
    process = subprocess.Popen(command, cwd=project, stderr=subprocess.DEVNULL, text=True)
    try:
        log, health = project / ".tracking/prefect/mlflow.log", f"http://127.0.0.1:{port}/health"
        await_health(process, Supervised(name="mlflow", command=[], environment={}, log=log, health=health))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def test_mlflow_shows_the_page_among_the_artifacts(
    browser: Browser, mlflow_ui: str, project: Path, run_id: str
) -> None:
    experiment = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db").get_run(run_id).info.experiment_id
    opened = browser.new_page(viewport={"width": 1440, "height": 900})
    opened.goto(f"{mlflow_ui}/#/experiments/{experiment}/runs/{run_id}/artifacts/viewer.html")
    frame = opened.frame_locator("iframe")
    expect(frame.locator("html[data-ready=true]")).to_be_attached(timeout=PATIENCE_MS)
    expect(frame.locator("#list .row")).to_have_count(2)
    frame.locator("#list .row").nth(1).click()
    expect(frame.locator(".column > header b").last).to_have_text("after training")
    expect(frame.locator(".answer .token").first).to_be_visible()
    opened.close()
