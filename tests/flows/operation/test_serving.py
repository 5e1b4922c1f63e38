"""`make serve` for real: server, worker and deployments of a project whose stages are short scripts.

Then the refusals of servers and ports, with what the user is told to do.
"""

import base64
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from playwright.sync_api import Page
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from agent_r1.tracking import registry, store
from agent_r1.tracking.registry import Version
from flows.operation.deploy import SILENCE_S, ensure_automation, no_answer
from flows.operation.promote import PROMOTION
from flows.operation.serving import claim, own_password, require_server
from flows.processes import api_on
from tests.answering import answering, wait_for
from tests.cases import cases
from tests.fixtures import ROOT, Inside, WriteParams, chromium
from tests.flows.operation.evaluations import write_evaluation

RIGHT = (60, 62, 75, 95)  # questions that versions 1 to 4 answer right
PATIENCE_S = 400.0

TRAIN = """
import json, os, pathlib, time
from agent_r1.params import load
from agent_r1.records import Question
from agent_r1.tables import write_rows
from flows.stage import accelerator, run_stage

def train(run, fresh):
    folder = pathlib.Path("outputs/train") / run.label
    folder.mkdir(parents=True)
    with accelerator(1):
        (folder / "metrics.jsonl").write_text(json.dumps({"iteration": 0, "rollout/success": 0.5}) + "\\n")
        (folder / "mlflow_run_id").write_text("0" * 32)
        write_rows(load().places.questions, [], Question)
        (folder / "pid").write_text(str(os.getpid()))
        time.sleep(600 if run.seed else 0)

def start(run, fresh):
    run_stage(train, run=run, fresh=fresh)
"""
REGISTER = """
import pathlib

def register(run):
    file = pathlib.Path("outputs/register") / f"{run.label}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"version": "models:/agent_r1/7"}')
"""
VIEW = "raise SystemExit('there is nothing to show')"
EVALUATION = """
import pathlib
from prefect import flow
from prefect.settings import get_current_settings

@flow(name="evaluation")
def evaluation(models: list[str] | None = None, dataset: str | None = None) -> None:
    pathlib.Path("heartbeat_s").write_text(str(get_current_settings().flows.heartbeat_frequency))
"""
DONE = "stages: {prepare: {cmd: 'true'}, index: {cmd: 'true'}, warm_start: {cmd: 'true'}}"


@contextmanager
def bound() -> Iterator[int]:
    """A port that is taken; nothing answers there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@dataclass
class Served:
    folder: Path
    process: subprocess.Popen[str]
    client: SyncPrefectClient
    mlflow: str

    def trigger(
        self, deployment: str = "training", *, job_variables: dict[str, Any] | None = None, **parameters: Any
    ) -> FlowRun:
        found = self.client.read_deployment_by_name(f"{deployment}/{deployment}")
        return self.client.create_flow_run_from_deployment(found.id, parameters=parameters, job_variables=job_variables)

    def ends(self, run: FlowRun) -> str:
        """The message of a run, once it is in its last state."""
        state = wait_for(lambda: (now := self.client.read_flow_run(run.id).state) and now.is_final() and now)
        return str(state)

    @property
    def page(self) -> str:
        return str(PREFECT_API_URL.value()).removesuffix("/api")

    @property
    def password(self) -> str:
        return (self.folder / ".tracking/prefect/password").read_text()

    def state(self, run: FlowRun) -> str:
        return str(self.client.read_flow_run(run.id).state_name)

    def stage(self, seed: int) -> int:
        pid = self.folder / f"outputs/train/ppo-seed{seed}/pid"
        return int(wait_for(lambda: pid.exists() and pid.read_text()))

    def runs_of(self, deployment: str) -> list[FlowRun]:
        found = self.client.read_deployment_by_name(deployment)
        runs = self.client.read_flow_runs()
        return [run for run in runs if run.deployment_id == found.id and run.state_name == "Completed"]

    def processes(self) -> dict[int, str]:
        return working_in(self.folder)


def at_a_browser(look: Callable[[Page], str]) -> str:
    """Text that a new browser finds. It has a thread of its own, because its driver keeps an event loop running."""

    def started() -> str:
        with chromium() as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.set_default_timeout(PATIENCE_S * 1000)
            return look(page)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(started).result()


TOAST = "[data-sonner-toast]"


def enter(page: Page, password: str) -> None:
    """Types the password, before which the page shows nothing of what it was refused."""
    field = page.locator("input[type=password]")
    field.wait_for()
    page.wait_for_load_state("networkidle")
    assert not page.locator(TOAST).all_inner_texts()
    field.fill(password)
    page.keyboard.press("Enter")
    field.wait_for(state="hidden")


def answered(page: Page, address: str, password: str, run: FlowRun) -> str:
    """Looks at the pages that docs/ leads to, and says yes on that of a promotion that waits; gives the question."""
    link = f"{address}/runs/flow-run/{run.id}"  # as `prefect deployment run` prints it
    page.goto(link)
    enter(page, password)
    new = page.url.partition("/v2")[0] + "/v2"
    for view, text in (
        ("deployments", "after-training"),
        (f"deployments/deployment/{run.deployment_id}/run", "challenger"),
        ("blocks/catalog", "Slack Webhook"),
        ("automations", "agent_r1: silent runs have crashed"),
    ):
        page.goto(f"{new}/{view}")
        page.get_by_text(text).first.wait_for()
    page.goto(link)
    page.locator("main button[aria-haspopup=menu]").first.click()
    page.get_by_role("menuitem", name="Resume").click()
    dialog = page.get_by_role("dialog")
    asked = dialog.get_by_text("to take the place of").inner_text()
    dialog.locator("[role=switch], [role=checkbox]").first.click()

    def taken() -> bool:
        """A busy server may refuse the first try, and a person presses again."""
        dialog.get_by_role("button", name="Resume").click()
        try:
            dialog.wait_for(state="hidden", timeout=20_000)
        except PlaywrightTimeout:
            logging.warning("the page says %s", page.locator(TOAST).all_inner_texts())
            return False
        return True

    wait_for(taken)
    return asked


def working_in(folder: Path) -> dict[int, str]:
    there = [each for each in psutil.process_iter(["cwd", "cmdline"]) if each.info["cwd"] == str(folder)]
    return {each.pid: " ".join(each.info["cmdline"]) for each in there if each.info["cmdline"]}


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory,
    write_params: WriteParams,
    lay_dvc: Callable[..., None],
    inside: Inside,
    register_descriptor: Callable[..., Version],
) -> Path:
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(ROOT / "flows", folder / "flows", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("prefect.yaml", "prefect.toml"):
        shutil.copy(ROOT / file, folder)
    for name, source in (("train", TRAIN), ("operation/register", REGISTER), ("view", VIEW)):
        (folder / "flows" / f"{name}.py").write_text(source)
    with (folder / "flows" / "operation" / "deployments.py").open("a") as deployments:
        deployments.write(EVALUATION)  # in place of the flow of that name
    write_params(folder, {"promote": {"yes_within_h": 24}})
    (folder / "dvc.yaml").write_text(DONE)
    lay_dvc(folder)
    with inside(folder):
        for letter, right in zip("abcd", RIGHT, strict=True):
            version = register_descriptor(letter * 64, f"run_{letter}")
            write_evaluation(Path(f"outputs/history/{version.name}/20200101T000000.000000Z"), version, right)
        registry.promote(registry.find("models:/agent_r1/1"), expected=None)
    return folder


@pytest.fixture(scope="module")
def served(project: Path) -> Iterator[Served]:
    with bound() as prefect_port, bound() as mlflow_port:
        pass
    own = dict.fromkeys(("TMPDIR", "AGENT_R1_LOCKS"), str(project))
    ports = ["--prefect-port", str(prefect_port), "--mlflow-port", str(mlflow_port)]
    with (project / "said").open("w") as said_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows", "serving", *ports],
            cwd=project,
            env={**os.environ, **own, "PYTHONPATH": str(ROOT), "PREFECT_WORKER_QUERY_SECONDS": "1"},
            stderr=said_file,
            text=True,
        )
    try:
        said = (project / "said").read_text
        wait_for(lambda: "Ctrl-C" in said(), process, said=said)
        with (
            temporary_settings(
                {
                    PREFECT_API_URL: f"http://127.0.0.1:{prefect_port}/api",
                    PREFECT_API_AUTH_STRING: (project / ".tracking/prefect/password").read_text(),
                }
            ),
            get_client(sync_client=True) as client,
        ):
            mlflow = f"http://127.0.0.1:{mlflow_port}"
            yield Served(folder=project, process=process, client=client, mlflow=mlflow)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def test_version_that_a_training_registered_is_evaluated_though_its_page_has_failed(served: Served) -> None:
    run = served.trigger(run="ppo", seed=0)
    evaluated = wait_for(lambda: served.runs_of("evaluation/after-training"))
    assert "registered as models:/agent_r1/7" in served.ends(run)
    assert evaluated[0].parameters["models"] == ["models:/agent_r1/7"]
    assert 2 * int((served.folder / "heartbeat_s").read_text()) < SILENCE_S


def test_only_the_operator_gets_an_answer(served: Served) -> None:
    """Not a neighbour without the password, nor a page in the operator's browser, which knows it."""
    url = PREFECT_API_URL.value()
    encoded = base64.b64encode(served.password.encode()).decode()
    known, evil = {"Authorization": f"Basic {encoded}"}, {"Origin": "https://evil.example"}
    with httpx.Client(timeout=PATIENCE_S) as web:
        assert web.get(f"{url}/admin/version", headers=known).status_code == 200
        assert web.get(f"{url}/admin/version").status_code == 401
        for path in ("/version", "/docs", "/openapi.json"):
            page = url.removesuffix("/api") + path
            assert (web.get(page).status_code, web.get(page, headers=known).status_code) == (401, 200)
        assert web.get(f"{url}/csrf-token", params={"client": "neighbour"}).status_code == 401
        assert web.post(f"{url}/flow_runs/filter", json={}, headers=known | evil).status_code == 403  # without a token
        preflight = web.options(url, headers=known | evil | {"Access-Control-Request-Method": "GET"})
        assert (preflight.status_code, "Access-Control-Allow-Origin" in preflight.headers) == (400, False)
        rebound = {"Host": "evil.example"}  # a name that was made to mean this machine
        assert web.get(f"{url}/admin/version", headers=known | rebound).status_code == 400


def test_password_is_its_owners_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    file = served.folder / ".tracking/prefect/password"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text() in (served.folder / "said").read_text()
    monkeypatch.chdir(served.folder)
    assert own_password() == file.read_text()
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"others may know .*password; remove it, and a new password is made"):
        own_password()
    file.chmod(0o600)


@pytest.mark.parametrize("chosen", [{"command": "touch ran"}, {"env": {"PATH": ""}}, {"working_dir": "/"}])
def test_run_with_a_variable_of_its_own_is_refused(served: Served, chosen: dict[str, Any]) -> None:
    """In a work pool that an earlier version of the project left, too."""
    with pytest.raises(PrefectHTTPStatusError, match=f"{next(iter(chosen))}' was unexpected"):
        served.trigger(run="ppo", job_variables=chosen)


def test_promotion_waits_for_a_yes_and_asks_anew_about_another_champion(served: Served, inside: Inside) -> None:
    run = served.trigger("promote", challenger="models:/agent_r1/3")
    wait_for(lambda: served.state(run) == "Suspended")
    wait_for(lambda: not any("prefect.engine" in line for line in served.processes().values()))
    assert served.client.read_global_concurrency_limit_by_name(PROMOTION).active_slots == 0
    with inside(served.folder):
        registry.promote(registry.find("models:/agent_r1/2"), expected=registry.champion())
    served.client.resume_flow_run(run.id, run_input={"promote": True})
    wait_for(lambda: served.state(run) == "Suspended")
    with inside(served.folder):
        assert registry.find(registry.THE_CHAMPION).number == 2
    asked = at_a_browser(partial(answered, address=served.page, password=served.password, run=run))
    assert "Is agent_r1-v3 to take the place of agent_r1-v2? Success 0.750 against 0.620, the lower bound +0" in asked
    assert "promoted: +0.130" in served.ends(run)
    with inside(served.folder):
        assert registry.find(registry.THE_CHAMPION).number == 3


def test_no_answer_is_a_no(served: Served, inside: Inside) -> None:
    promotion = served.client.read_deployment_by_name("promote/promote")
    ensure_automation(served.client, no_answer(promotion.id, hours=0))
    with inside(served.folder):
        before = registry.find(registry.THE_CHAMPION).number
    run = served.trigger("promote", challenger="models:/agent_r1/4")
    assert "but nobody said yes within 24 h" in served.ends(run)
    assert served.state(run) == "Refused"
    with inside(served.folder):
        assert registry.find(registry.THE_CHAMPION).number == before


def test_cancel_leaves_no_process_and_frees_the_accelerator(served: Served) -> None:
    run = served.trigger(run="ppo", seed=1)
    stage = served.stage(1)
    served.client.set_flow_run_state(run.id, Cancelling())
    wait_for(lambda: served.state(run) == "Cancelled")
    assert stage not in served.processes()
    assert not any("prefect.engine" in line for line in served.processes().values())


def test_killed_worker_is_replaced_and_its_run_crashed(served: Served) -> None:
    run = served.trigger(run="ppo", seed=2)
    stage = served.stage(2)
    (worker,) = (pid for pid, line in served.processes().items() if "flows.apps worker start" in line)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: served.state(run) == "Crashed")
    wait_for(lambda: stage not in served.processes())
    wait_for(lambda: any("flows.apps worker start" in line for line in served.processes().values()))
    assert "the worker ended with code -9, see .tracking/prefect/worker.log" in (served.folder / "said").read_text()


def test_cron_schedule_fires(served: Served) -> None:
    """One with seconds, as a sixth field: nobody waits for three in the morning."""
    path = served.folder / "prefect.yaml"
    nightly = path.read_text()
    assert '"0 3 * * *"' in nightly
    path.write_text(nightly.replace("0 3 * * *", "* * * * * */20"))
    told = {"PREFECT_API_URL": PREFECT_API_URL.value(), "PREFECT_API_AUTH_STRING": served.password}
    environment = {**os.environ, **told, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "flows", "deploy"], check=True, cwd=served.folder, env=environment)
    wait_for(lambda: served.runs_of("evaluation/nightly"))
    assert all(run.auto_scheduled for run in served.runs_of("evaluation/nightly"))
    deployment = served.client.read_deployment_by_name("evaluation/nightly")
    for schedule in deployment.schedules:
        served.client.update_deployment_schedule(deployment.id, schedule.id, active=False)


def test_interrupt_ends_everything(served: Served) -> None:
    assert len(served.processes()) >= 4
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait() == 130
    assert served.processes() == {}
    assert not (served.folder / "mlflow.db").exists()  # its state is under .tracking


@contextmanager
def a_version(body: str) -> Iterator[str]:
    """The API URL of a server that answers every request with this body."""
    with answering(lambda _: (200, body.encode())) as url:
        yield f"{url}/api"


def test_port_in_use_is_named_with_the_remedy() -> None:
    with bound() as port:
        message = rf"port {port} of 127\.0\.0\.1 .*in use.*; end the program .* --mlflow-port {port + 1}`"
        with pytest.raises(ValueError, match=message):
            claim(port, "mlflow")
    claim(port, "mlflow").close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('"2.20.1"', rf" is Prefect 2\.20\.1, and this project has {version('prefect')}; run the same major version"),
        ("<html>", " is no Prefect server; it should end in /api"),
    ],
)
def test_server_of_another_kind_or_version_is_refused(body: str, message: str) -> None:
    with a_version(body) as url, pytest.raises(ValueError, match=rf"{url}{message}"):
        require_server(url)


def test_another_minor_version_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    major, minor, _ = version("prefect").split(".")
    for server, warned in ((f"{major}.{minor}.999", False), (f"{major}.{int(minor) + 2}.1", True)):
        with a_version(f'"{server}"') as url:
            require_server(url)
        assert (f"is Prefect {server}, and this project has {version('prefect')}; where they" in caplog.text) == warned


def test_server_that_does_not_answer_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        url = api_on(silent.getsockname()[1])
        with pytest.raises(OSError, match=rf"no Prefect server answers at PREFECT_API_URL {url} .*; start it there"):
            require_server(url.replace("://", "://me:secret@"))


@cases("environment, address")
def test_mlflow_address_of_browser(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], address: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert store.address(5001) == address
