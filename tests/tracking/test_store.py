"""MLflow's store: made whole or not at all, at home where it was copied to, and clear about what became of it."""

import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import mlflow.cli
import pytest
from click.testing import CliRunner
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import OperationalError

from agent_r1 import tracking
from agent_r1.files import sha256
from agent_r1.tracking.store import mendable_fault, open_store, require_store

ROOT = Path(__file__).parents[2]


def test_copied_project_leaves_the_original_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, copied = tmp_path / "the original_%", tmp_path / "copy"
    original.mkdir()
    shutil.copy(ROOT / "params.yaml", original)
    monkeypatch.chdir(original)
    run = tracking.start("ppo-seed0", {"variant": "ppo"}, {})
    page = Path(".tracking/artifacts") / run.run_id / "artifacts" / "viewer.html"
    page.parent.mkdir(parents=True)  # by hand: MLflow remembers as long as a process lives where it logged before
    page.write_text("the original's")
    client, _ = open_store()
    client.create_registered_model("agent_r1")
    source = f"{client.get_run(run.run_id).info.artifact_uri}/descriptor.json"
    client.create_model_version("agent_r1", source, run.run_id)
    client.create_experiment("elsewhere", (tmp_path / "elsewhere").as_uri())
    assert require_store() == str(original / ".tracking/mlflow.db")
    shutil.copytree(original, copied)
    hash_before = sha256(original)

    monkeypatch.chdir(copied)
    assert f"came from {original} and keeps here" in require_store()
    assert require_store() == str(copied / ".tracking/mlflow.db")  # from now on it is at home
    same = tracking.resume(run.run_id)
    same.text("the copy's", "viewer.html")
    other = tracking.start("ppo-seed1", {"variant": "ppo"}, {})
    other.text("new", "viewer.html")
    moved = MlflowClient(f"sqlite:///{copied}/.tracking/mlflow.db")
    home = (copied / ".tracking/artifacts").as_uri()
    assert moved.get_run(other.run_id).info.artifact_uri == f"{home}/{other.run_id}/artifacts"
    assert moved.get_model_version("agent_r1", "1").source == f"{home}/{run.run_id}/artifacts/descriptor.json"
    assert (page.read_text(), (original / page).read_text()) == ("the copy's", "the original's")
    elsewhere = moved.get_experiment_by_name("elsewhere")
    assert elsewhere.artifact_location == (tmp_path / "elsewhere").as_uri()
    assert sha256(original) == hash_before


KILLED = """
import os, signal, sys
from agent_r1.tracking import store

def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

def watch(place: str) -> None:
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    seen = []
    if place == "rename":
        sys.addaudithook(lambda name, given: name == "os.rename" and str(given[1]).endswith("mlflow.db") and end())
        return
    @event.listens_for(Engine, "before_cursor_execute")
    def look(*_):
        seen.append(1)
        if len(seen) == int(place):
            end()

import mlflow, mlflow.store.tracking.sqlalchemy_store, alembic.command  # before the forks
for place in sys.argv[1:]:
    if not (pid := os.fork()):
        watch(place)
        store.open_store()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, place
client, experiment = store.open_store()
print(client.create_run(experiment).info.experiment_id)
"""


@pytest.mark.slow  # MLflow makes a store three times
def test_kill_while_the_store_is_made_leaves_none(tmp_path: Path) -> None:
    """In a migration that copies a table, and when all of them are through."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / ".tracking").mkdir()
    (tmp_path / ".tracking/mlflow.db-journal").write_bytes(b"of a store that was removed")
    command = [sys.executable, "-c", KILLED, "850", "rename"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert process.stdout == "1\n", process.stderr
    names = sorted(path.name for path in (tmp_path / ".tracking").iterdir())
    assert names[:2] == [".lock", "mlflow.db"]
    assert [name[:18] for name in names[2:]] == ["mlflow.db-journal-"], "moved aside, as SQLite would read it"
    assert (tmp_path / ".tracking/mlflow.db").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lay_store: Callable[[Path], None]) -> Path:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    lay_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(message: object, *expected: str) -> str:
    """The command in a message that a user may type."""
    (command,) = re.findall("`(.*?)`", str(message))
    for word in expected:
        assert word in command
    return str(command)


def test_half_made_store_is_moved_away_by_the_named_command(project: Path, lay_store: Callable[[Path], None]) -> None:
    """As MLflow itself leaves it: a table of a migration that did not end is in the way of the next."""
    file = project / ".tracking/mlflow.db"
    moved_file = file.rename(project / "whole")
    with closing(sqlite3.connect(file)) as half, half:
        half.execute("CREATE TABLE _alembic_tmp_trace_tags (key TEXT)")
    with pytest.raises(OperationalError) as refusal:
        open_store()
    fault = mendable_fault(refusal.value)
    assert isinstance(fault, ValueError), "which ends with 1: nobody need try again"
    assert "(table _alembic_tmp_trace_tags already exists)" in str(fault)
    subprocess.run(typed(fault, "damaged"), shell=True, check=True)
    assert not file.exists()
    moved_file.rename(file)
    assert (project / ".tracking/damaged/mlflow.db").exists()


def test_deleted_experiment(project: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tracking.start("ppo-seed0", {"variant": "ppo"}, {})
    client, experiment = open_store()

    def type_back(message: object, *expected: str) -> None:
        variable, *words = shlex.split(typed(message, *expected))
        with monkeypatch.context() as typing:
            typing.setenv(*variable.split("=", 1))
            result = CliRunner().invoke(mlflow.cli.cli, words[1:], catch_exceptions=False)
        assert result.exit_code == 0

    client.rename_experiment(experiment, "a neighbour's")
    assert open_store()[1] == experiment
    assert tracking.resume(run.run_id) is not None
    assert tracking.log_traces(run.run_id, [], str) == 0
    (warned,) = [each.getMessage() for each in caplog.records if "is called a neighbour's now" in each.message]
    type_back(warned, "rename")
    assert client.get_experiment(experiment).name == "agent_r1"

    client.delete_experiment(experiment)
    with pytest.raises(MlflowException) as gone:
        run.log({"rollout/em": 0.5}, step=0)
    assert "start again" in str(mendable_fault(gone.value))
    with pytest.raises(ValueError, match="is in the trash") as refusal:
        open_store()
    with pytest.raises(ValueError, match="is in the trash"):
        require_store()
    type_back(refusal.value, "restore")
    same = tracking.resume(run.run_id)
    same.log({"rollout/em": 0.5}, step=0)


@pytest.mark.parametrize("fault", [AssertionError(), sqlite3.IntegrityError("UNIQUE constraint failed")])
def test_fault_of_the_project_keeps_its_traceback(fault: Exception) -> None:
    assert mendable_fault(fault) is None


def test_store_that_was_removed_while_it_was_in_use_is_named(project: Path) -> None:
    run = tracking.start("ppo-seed0", {"variant": "ppo"}, {})
    shutil.rmtree(project / ".tracking")
    with pytest.raises(MlflowException) as refusal:
        run.log({"rollout/em": 0.5}, step=0)
    fault = mendable_fault(refusal.value)
    assert isinstance(fault, ValueError)
    assert str(fault).startswith(f"{project}/.tracking/mlflow.db was removed while it was in use")
