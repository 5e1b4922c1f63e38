"""A company's MLflow: MLflow's own server with accounts, behind a path prefix, keeps all that the project logs."""

import logging
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from playwright.sync_api import Browser, expect
from werkzeug.security import generate_password_hash

from agent_r1 import tracking
from agent_r1.records import Question, Source
from agent_r1.tracking import registry, store
from agent_r1.tracking.store import mendable_fault, require_store
from agent_r1.tracking.traces import Rewarded
from tests.answering import process_of
from tests.descriptors import describe
from tests.fixtures import ROOT, FreePort
from tests.trajectories import from_parts, question_fields

pytest.importorskip("flask_wtf", reason="MLflow's server with accounts needs it")

ADMIN = "operator"


@dataclass(frozen=True)
class Company:
    url: str  # with its prefix
    password: str  # of all accounts


@pytest.fixture(scope="module")
def company(
    tmp_path_factory: pytest.TempPathFactory, free_port: FreePort, lay_store: Callable[[Path], None]
) -> Iterator[Company]:
    """A server with the accounts `operator`, `ann`, who writes first, and `bob`, who may only read what is ann's."""
    folder, port, password = tmp_path_factory.mktemp("company"), free_port(), secrets.token_urlsafe(18)
    lay_store(folder)
    (folder / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{folder}/accounts.db\n"
        f"admin_username = {ADMIN}\nadmin_password = {password}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    options = f"--app-name basic-auth --static-prefix /team/mlflow --host 127.0.0.1 --port {port} --workers 1".split()
    options += ["--backend-store-uri", f"sqlite:///{folder}/.tracking/mlflow.db"]
    options += ["--artifacts-destination", str(folder / "files")]
    variables = {
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_urlsafe(18),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    command = ["-m", "mlflow", "server", *options]
    with process_of(command, f"http://127.0.0.1:{port}/team/mlflow", folder, **variables) as url:
        for name in ("ann", "bob"):
            account = {"username": name, "password": password}
            reply = httpx.post(f"{url}/api/2.0/mlflow/users/create", json=account, auth=(ADMIN, password), timeout=60)
            assert reply.is_success, reply.text
        with closing(sqlite3.connect(folder / "accounts.db")) as accounts, accounts:  # hashes that take no time
            cheap = generate_password_hash(password, "pbkdf2:sha256:1")
            accounts.execute("UPDATE users SET password_hash = ?", (cheap,))
        yield Company(url, password)


@pytest.fixture
def log_in(
    company: Company, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], MlflowClient]]:
    """Makes an account this process's own, in a project whose store is the company's."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)

    def enter(name: str, password: str = company.password) -> MlflowClient:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", company.url)
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", name)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        store.warn_once.cache_clear()
        return MlflowClient(company.url)

    yield enter
    mlflow.set_tracking_uri(None)  # type: ignore[arg-type]


def test_company_server_keeps_all_pages(
    log_in: Callable[..., MlflowClient], caplog: pytest.LogCaptureFixture, browser: Browser, company: Company
) -> None:
    client = log_in("ann")
    assert require_store().endswith("/team/mlflow")
    question = Question(**question_fields(text="Who directed Veld?"))
    played = from_parts([(Source.PROMPT, [0]), (Source.ACTION, [1, 1])], [{"rewards": {"em": 1.0}}])
    with tracking.start("ppo", {"variant": "ppo"}, {"kind": "training"}) as run:
        run.uses({"atlas questions": (Path("questions.parquet"), "5" * 64)}, "test")
        run.text("said", "note.txt")
    version = registry.register(describe("5" * 64, mlflow_run_id=run.run_id), files=[Path("params.yaml")])
    run.final({"success": 0.8, "success/low": 0.7, "success/high": 0.9})
    tracking.keep_questions("atlas", "5" * 64, [question])
    tracking.keep_prompt(run.run_id, "agent_r1-prompt", "6" * 64, "Answer.")
    assert tracking.log_traces(run.run_id, [Rewarded("test", question, played)], str) == 1
    assert registry.promote(version, expected=None).is_champion
    champion = registry.champion()
    assert (champion.number, champion.score) == (1, "0.800")
    [data] = client.search_datasets([client.get_run(run.run_id).info.experiment_id])
    assert data.name == "atlas"
    assert client.load_prompt("prompts:/agent_r1-prompt/1").tags["sha256"] == "6" * 64
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    tab = browser.new_page(http_credentials={"username": "ann", "password": company.password})
    tab.goto(store.comparison())
    for text in ("1 matching run", "final/success"):
        expect(tab.get_by_text(text).first).to_be_visible(timeout=60_000)

    log_in("bob")
    assert registry.find("models:/agent_r1@champion") == champion, "who may read finds the champion"
    with pytest.raises(MlflowException) as refusal:
        tracking.start("ppo", {"variant": "ppo"}, {"kind": "training"})
    complaint = str(mendable_fault(refusal.value))
    assert "refuses this" in complaint
    assert "for EDIT on this experiment" in complaint
    for _ in range(2):
        tracking.keep_questions("atlas of bob", "5" * 64, [question])
    [warned] = [message for message in caplog.messages if "evaluation data set" in message]
    assert "cannot be kept" in warned


@pytest.mark.parametrize("account", [("ann", "zebra"), ("nobody", "zebra"), ("", "")])
def test_unfit_password_is_named_with_remedy(log_in: Callable[..., MlflowClient], account: tuple[str, str]) -> None:
    log_in(*account)
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD") as refusal:
        require_store()
    assert "zebra" not in str(refusal.value)
