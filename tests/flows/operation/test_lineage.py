"""Lineage in a real project: DVC and MLflow's registry after three trainings on two versions of the data."""

import io
import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.files import sha256, write_text
from agent_r1.params import load
from agent_r1.params.places import registered_policy, registered_training
from agent_r1.tracking import registry
from agent_r1.tracking.registry import Version
from flows.dvc_files import DVC
from flows.operation.lineage import lineage
from flows.operation.register import keep
from tests.cases import cases

ROOT = Path(__file__).parents[3]
Inside = Callable[[Path], AbstractContextManager[None]]
Register = Callable[..., Version]
TRAINING = Path("outputs/train/ppo")
POLICY = TRAINING / "checkpoint/policy"
PASSAGES = Path("data/prepared/passages.parquet")
QUESTIONS = Path("data/prepared/questions.parquet")


def trained(register: Register, rows: str, weights: str, *, keeps_training: bool = True) -> Version:
    write_text(PASSAGES, "passages")
    write_text(QUESTIONS, rows)
    write_text(POLICY / "model", weights)
    write_text(TRAINING / "trajectories/000.parquet", f"{weights} acted")
    file = registered_policy("ppo", sha256(POLICY))
    return register(
        sha256(POLICY),
        dvc_file=file.as_posix(),
        dvc_hash=keep(POLICY, file),
        git_commit="ab" * 20,
        data_hash="c" * 32,
        questions=sha256(QUESTIONS),
        passages=sha256(PASSAGES),
        index="9" * 64,
        dvc_training_hash=keep(TRAINING, registered_training(file)) if keeps_training else "",
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, inside: Inside, register_descriptor: Register) -> Path:
    """Version 1 and 2 are of the first data, 3 is of the second; 2 is the champion. DVC keeps no training of 2."""
    folder = tmp_path_factory.mktemp("lineage")
    (folder / ".dvc").mkdir()
    site = f" site_cache_dir = {folder / 'site'}\n"
    (folder / ".dvc" / "config").write_text(f"[core]\n no_scm = true\n analytics = false\n{site}")
    shutil.copy(ROOT / "params.yaml", folder)
    with inside(folder):
        trained(register_descriptor, "first rows", "first weights")
        champion = trained(register_descriptor, "first rows", "second weights", keeps_training=False)
        trained(register_descriptor, "second rows", "third weights")
        registry.promote(champion, expected=None)
    return folder


@pytest.fixture
def versions(project: Path, inside: Inside) -> Iterator[list[Version]]:
    with inside(project):
        yield registry.versions()


def printed(subject: str) -> str:
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(lineage(subject))
    return console.export_text()


def test_champion_leads_to_data_trajectories_config_and_commit(versions: list[Version]) -> None:
    model = versions[1].descriptor
    lines = [line.strip(" │├└─") for line in printed("models:/agent_r1@champion").splitlines()]
    assert lines[0] == "models:/agent_r1/2 @champion ppo"
    assert printed("ppo").startswith("models:/agent_r1/3 ppo"), "a label is the model in its training's folder"
    assert [line.split()[0] for line in lines[1:4]] == ["policy", "run", "commit"]
    for fact in (
        f"policy {model.policy_hash}, after {model.policy_version} updates",
        f"fingerprint {model.config}",
        f"questions {model.questions}",
        f"DVC {model.data_hash}",
        f"commit {model.git_commit}",
        f"folder {TRAINING}/trajectories, while the training is there: DVC keeps no copy",
    ):
        assert fact in lines


def test_score_stands_near_the_top_once_the_policy_is_evaluated(versions: list[Version]) -> None:
    folder = load().places.evaluation("ppo")
    write_text(folder / "hashes.json", json.dumps({"policy": versions[2].descriptor.policy_hash}))
    write_text(folder / "scores.json", json.dumps({"success": 0.8925, "questions": 400}))
    try:
        [_, _, score, *_] = printed("models:/agent_r1/3").splitlines()
        assert score.endswith(f"score success 0.892 on 400 questions, in {folder}")
        assert "score" not in printed("models:/agent_r1/2")
    finally:
        shutil.rmtree(folder)


def test_trajectories_come_back_by_the_command_that_is_shown(versions: list[Version], tmp_path: Path) -> None:
    [line] = [line for line in printed("models:/agent_r1/1").splitlines() if "get them" in line]
    command = shlex.split(line.partition("get them ")[2])
    assert command[:3] == ["dvc", "get", "."]
    subprocess.run([*DVC, *command[1:-1], str(tmp_path / "back")], check=True)
    assert (tmp_path / "back" / "000.parquet").read_text() == "first weights acted"


@cases("subject, message")
def test_unknown_subject_is_refused(versions: list[Version], subject: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        printed(subject)
