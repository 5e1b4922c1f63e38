"""A project that was copied with its store writes at home, and the one that it was copied from stays as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from agent_r1 import tracking
from agent_r1.files import sha256
from agent_r1.tracking.store import open_store, require_store

ROOT = Path(__file__).parents[2]


def test_a_copied_project_writes_at_home_and_leaves_the_original_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    before = sha256(original)

    monkeypatch.chdir(copied)
    assert f"came from {original} and keeps here" in require_store()
    assert require_store() == str(copied / ".tracking/mlflow.db")  # from now on it is at home
    same = tracking.resume(run.run_id)
    assert same is not None
    same.text("the copy's", "viewer.html")
    other = tracking.start("ppo-seed1", {"variant": "ppo"}, {})
    other.text("new", "viewer.html")
    moved = MlflowClient(f"sqlite:///{copied}/.tracking/mlflow.db")
    home = (copied / ".tracking/artifacts").as_uri()
    assert moved.get_run(other.run_id).info.artifact_uri == f"{home}/{other.run_id}/artifacts"
    assert moved.get_model_version("agent_r1", "1").source == f"{home}/{run.run_id}/artifacts/descriptor.json"
    assert (page.read_text(), (original / page).read_text()) == ("the copy's", "the original's")
    elsewhere = moved.get_experiment_by_name("elsewhere")
    assert elsewhere is not None
    assert elsewhere.artifact_location == (tmp_path / "elsewhere").as_uri()
    assert sha256(original) == before
