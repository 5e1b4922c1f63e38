"""The page where MLflow shows it: in a frame of its own, from which its script may reach nothing else.

And MLflow's other views, for a browser that knows the password and one that does not.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mlflow
import pytest
from mlflow import MlflowClient
from playwright.sync_api import Browser, Error, expect

from agent_r1 import tracking
from agent_r1.inspection.stored import PageTrajectory, When
from agent_r1.inspection.viewer import page
from agent_r1.records import Question, Source
from agent_r1.tracking import registry
from agent_r1.tracking.traces import Rewarded
from flows.processes import Supervised, await_health
from tests.descriptors import describe
from tests.fixtures import ROOT, FreePort
from tests.trajectories import from_parts, question_fields

PATIENCE_MS = 60_000
MEASURED_ON = "atlas test questions abababab, 9"


@pytest.fixture
def project(tmp_path: Path, lay_store: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    lay_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


@pytest.fixture
def run_id(project: Path, make_entry: Callable[..., PageTrajectory], words: Any) -> str:
    about: dict[str, Any] = {"facts": [], "weights": {}, "notes": []}
    pair = [make_entry(when=When.BEFORE, answer="Veld"), make_entry(when=When.AFTER)]
    with tracking.start("ppo", {}, {}) as run:
        run.text(page("ppo", about, [pair], words.decode), "viewer.html")
    return str(run.run_id)


@pytest.fixture
def mlflow_ui(project: Path, run_id: str, free_port: FreePort) -> Iterator[str]:
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


def known(project: Path) -> Any:
    return {"username": "anybody", "password": (project / ".tracking/prefect/password").read_text()}


@pytest.fixture
def versions(project: Path, run_id: str) -> Iterator[None]:
    """Five versions of the registry, evaluated, and two traced episodes beside them."""
    files = {MEASURED_ON: (Path("data/prepared/questions.parquet"), "ab" * 32)}
    for number in range(5):
        run = tracking.start(f"ppo-seed{number}", {"variant": "ppo", "seed": number}, {"kind": "training"})
        run.log({"rollout/success": 0.7734375}, step=0)
        run.uses(files, "test")
        registry.register(describe(f"{number}" * 64, f"ppo-seed{number}", mlflow_run_id=run.run_id))
        run.final({"success": 0.8 + number / 100, "success/low": 0.75, "success/high": 0.9})
    played = from_parts([(Source.PROMPT, [0]), (Source.ACTION, [1, 1])], [{"rewards": {"em": 1.0}}])
    question = Question(**question_fields("director-of-veld", text="Who directed Veld?"))
    tracking.log_traces(run_id, [Rewarded("test", question, played)], str)
    tracking.keep_questions(MEASURED_ON, "ab" * 32, [question])
    tracking.keep_prompt(run_id, "agent_r1-prompt", "cd" * 32, "Search, then answer.")
    yield
    mlflow.set_tracking_uri(None)  # type: ignore[arg-type]


def test_first_visitor_sees_pages(browser: Browser, versions: None, mlflow_ui: str, project: Path, run_id: str) -> None:
    """One click from the address to the charts, at a laptop's size; a stranger sees nothing."""
    stranger = browser.new_page()
    with pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):
        stranger.goto(mlflow_ui)
    stranger.close()
    context = browser.new_context(viewport={"width": 1280, "height": 800}, http_credentials=known(project))
    context.set_default_timeout(PATIENCE_MS)
    tab, refused = context.new_page(), list[str]()
    tab.on("response", lambda answer: refused.append(answer.url) if answer.status == 403 else None)
    tab.goto(mlflow_ui)
    expect(tab.get_by_text("6 matching runs")).to_be_visible(timeout=PATIENCE_MS)
    expect(tab.get_by_text("Group: ppo")).to_have_count(1)
    expect(tab.get_by_text("Welcome to MLflow Assistant")).to_have_count(0)
    tab.locator("label:has(input[value=CHART])").click()
    chart = tab.locator(".js-plotly-plot").first
    expect(chart).to_be_visible(timeout=PATIENCE_MS)
    shown = chart.bounding_box()
    assert shown["width"] > 250
    assert shown["height"] > 150
    tab.get_by_role("link", name="Models", exact=True).click()
    expect(tab.get_by_role("link", name="ppo-seed4").first).to_be_visible(timeout=PATIENCE_MS)
    tab.get_by_role("link", name="Traces", exact=True).click()
    expect(tab.get_by_text("Who directed Veld?", exact=True).first).to_be_visible(timeout=PATIENCE_MS)
    expect(tab.get_by_text("Got it")).to_have_count(0)
    tab.get_by_role("link", name="Model registry").click()
    tab.locator("a[href='#/models/agent_r1']").first.click()
    rows = tab.get_by_role("row").filter(has_text="Version ")
    expect(rows.filter(has_text="score")).to_have_count(5, timeout=PATIENCE_MS)
    boxes = [row.bounding_box() for row in rows.filter(has_text="score").all()]
    assert sum(box["height"] for box in boxes if box) < 600, "five versions on one screen"
    for text in ("0.84", "[0.75, 0.90]", "ppo-seed4"):
        expect(rows.filter(has_text="ppo-seed4").get_by_text(text).first).to_be_visible()
    assert not [url for url in refused if "gateway-proxy" in url], "MLflow says so in red"
    experiment = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db").get_run(run_id).info.experiment_id
    tab.goto(f"{mlflow_ui}/#/experiments/{experiment}/runs/{run_id}/artifacts/viewer.html")
    frame = tab.frame_locator("iframe")
    expect(frame.locator("#list .row")).to_have_count(2, timeout=PATIENCE_MS)
    frame.locator("#list .row").nth(1).click()
    expect(frame.locator(".column > header b").last).to_have_text("after training")
    assert context.cookies() == []
    context.close()


def test_one_click_leads_to_measured_policies(browser: Browser, versions: None, mlflow_ui: str, project: Path) -> None:
    """The run that was not measured is not among them. *Compare* opens on their scores; data and prompt have pages."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, http_credentials=known(project))
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    tab.goto(mlflow_ui)
    with context.expect_page() as following:
        tab.get_by_role("link", name=MEASURED_ON).first.click()
    expect(following.value.get_by_text("5 matching runs")).to_be_visible(timeout=PATIENCE_MS)
    client = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db")
    trained = [run.info for run in client.search_runs(["1"], "tags.kind = 'training'")]
    compared = quote(json.dumps([run.run_id for run in trained]))
    tab.goto(f"{mlflow_ui}/#/compare-runs?runs={compared}&experiments={quote(json.dumps(['1']))}")
    expect(tab.locator("body")).to_match_aria_snapshot('- text: "Metrics: final/success"', timeout=PATIENCE_MS)
    tab.goto(f"{mlflow_ui}/#/experiments/1/runs/{trained[0].run_id}")
    expect(tab.get_by_text("rollout/success").first).to_be_visible(timeout=PATIENCE_MS)
    page_text = tab.locator("body").inner_text()
    assert page_text.index("final/success") < page_text.index("rollout/success"), "a run's page has the score first"
    [data] = client.search_datasets(["1"])
    for view, text in (
        ("experiments/1/datasets", MEASURED_ON),
        (f"experiments/1/datasets/{data.dataset_id}", "Who directed Veld?"),
        ("experiments/1/prompts", "agent_r1-prompt"),
        ("prompts/agent_r1-prompt", "Search, then answer."),
        ("experiments/1/traces?groupBy=session", "director-of-veld"),
    ):
        tab.goto(f"{mlflow_ui}/#/{view}")
        expect(tab.get_by_text(text).first).to_be_visible(timeout=PATIENCE_MS)
    context.close()
