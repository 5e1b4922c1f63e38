"""Lineage in a real project: git, DVC and MLflow's registry after three trainings on two versions of the data."""

from __future__ import annotations

import io
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1 import tracking
from agent_r1.files import sha256, write_text
from agent_r1.params.places import registered_policy, registered_training
from agent_r1.tracking import registry
from agent_r1.tracking.registry import Version
from flows.dvc_files import DVC
from flows.operation.lineage import WORKSPACE, lineage, made_in, training_of, trajectory_facts
from flows.operation.register import keep
from tests.fixtures import ROOT, Inside

Register = Callable[..., Version]
POLICY = Path("outputs/train/ppo/checkpoint/policy")
QUESTIONS = Path("data/prepared/questions.parquet")

GRAPH = """
stages:
  prepare:
    cmd: python make.py prepare
    deps: [rows]
    outs: [data/prepared/passages.parquet, data/prepared/questions.parquet]
  train:
    foreach: [ppo]
    do:
      cmd: python make.py train
      deps: [weights, data/prepared, agent_r1/code, flows/code]
      outs: [outputs/train/ppo]
"""
MAKE = """
import sys
from pathlib import Path

def write(path, text):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)

rows, weights = Path("rows").read_text(), Path("weights").read_text()
if sys.argv[1] == "prepare":
    write("data/prepared/passages.parquet", "passages")
    write("data/prepared/questions.parquet", rows)
else:
    write("outputs/train/ppo/checkpoint/policy/model", weights)
    write("outputs/train/ppo/trajectories/000.parquet", weights + " acted")
"""


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def git(*arguments: str) -> str:
    return run("git", "-c", "user.name=agent", "-c", "user.email=agent@localhost", *arguments)


def dvc(*arguments: str) -> str:
    return run(*DVC, *arguments)


def trained(register: Register, rows: str, weights: str, *, keeps_training: bool = True) -> Version:
    """Runs the graph, commits what it made, and registers the policy, as a training does."""
    Path("rows").write_text(rows)
    Path("weights").write_text(weights)
    for room in ("agent_r1", "flows"):
        write_text(Path(room, "code"), "code")
    dvc("repro", "--quiet")
    tags = tracking.provenance("atlas")
    file = registered_policy("ppo", sha256(POLICY))
    version = register(
        sha256(POLICY),
        dvc_file=file.as_posix(),
        dvc_hash=keep(POLICY, file),
        git_commit=tags["git_commit"],
        data_hash=tags["data_hash"],
        questions=sha256(QUESTIONS),
        passages=sha256(Path("data/prepared/passages.parquet")),
        index="9" * 64,
        dvc_training_hash=keep(POLICY.parents[1], registered_training(file)) if keeps_training else "",
    )
    git("add", ".")
    git("commit", "--quiet", "--message", weights)
    return version


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, inside: Inside, register_descriptor: Register) -> Path:
    """Version 1 and 2 are of the first data, 3 is of the second; 2 is the champion, 3 is in the workspace.

    DVC keeps the training of version 3 alone, besides what it caches of the graph.
    """
    folder = tmp_path_factory.mktemp("lineage")
    (folder / ".dvc").mkdir()
    shutil.copy(ROOT / ".dvc" / "config", folder / ".dvc")
    (folder / ".dvc" / "config.local").write_text(f"[core]\n site_cache_dir = {folder / 'site'}\n")
    (folder / ".gitignore").write_text("/data\n/outputs\n/site\n/.tracking\n/.dvc\n/models/?*\n!/models/*.dvc\n")
    shutil.copy(ROOT / "params.yaml", folder)
    (folder / "dvc.yaml").write_text(GRAPH)
    (folder / "make.py").write_text(MAKE)
    with inside(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
        git("init", "--quiet")
        git("add", "make.py")
        git("commit", "--quiet", "--message", "begun")
        trained(register_descriptor, "first rows", "first weights", keeps_training=False)
        champion = trained(register_descriptor, "first rows", "second weights", keeps_training=False)
        trained(register_descriptor, "second rows", "third weights")
        registry.promote(champion, expected=None)
    return folder


@pytest.fixture
def versions(project: Path, inside: Inside) -> Iterator[list[Version]]:
    """The three, from inside the project."""
    with inside(project):
        yield registry.versions()


def printed(what: str) -> str:
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(*lineage(what))
    return console.export_text()


def test_a_model_leads_to_the_training_that_made_it(versions: list[Version]) -> None:
    found = [made for version in versions if (made := training_of(version.descriptor))]
    commits = git("log", "--reverse", "--format=%H").splitlines()
    assert [made.commit for made in found] == [*commits[1:3], WORKSPACE]
    assert found == [made_in(made.commit, "outputs/train/ppo") for made in found]
    data = [made.inputs["data/prepared"] for made in found]
    assert data[0] == data[1] != data[2]


def test_from_the_champion_to_data_trajectories_config_and_commit(versions: list[Version]) -> None:
    model, text = versions[1].descriptor, printed("models:/agent_r1@champion")
    training = training_of(model)
    assert training
    lines = [line.strip(" │├└─") for line in text.splitlines()]
    assert lines[0] == "models:/agent_r1/2 @champion ppo"
    assert [line.split()[0] for line in lines[1:4]] == ["policy", "run", "commit"]
    code = "2 files and folders of code, that trained it or was accepted,"
    assert lines[-1] == f"{code} see dvc.lock of commit {training.commit}"
    assert "agent_r1/code" not in text
    for name, value in (
        ("policy", f"{model.policy_hash}, after {model.policy_version} updates"),
        ("fingerprint", model.config),
        ("questions", model.questions),
        ("DVC", model.data_hash),
        ("DVC", f"outputs/train/ppo {training.md5}, commit {training.commit}"),
        ("data/prepared", training.inputs["data/prepared"]),
    ):
        assert f"{name} {value}" in lines
    assert f"commit {model.git_commit}" in lines


@pytest.mark.parametrize(
    ("model", "acted"),
    [("models:/agent_r1/1", "first weights acted"), ("models:/agent_r1/3", "third weights acted")],
    ids=["of the graph", "kept"],
)
def test_the_trajectories_come_back_by_the_command_that_is_shown(
    versions: list[Version], model: str, acted: str, tmp_path: Path
) -> None:
    [line] = [each for each in printed(model).splitlines() if "get them" in each]
    command = shlex.split(line.partition("get them ")[2])
    assert command[:3] == ["dvc", "get", "."]
    dvc(*command[1:-1], str(tmp_path / "back"))
    assert (tmp_path / "back" / "000.parquet").read_text() == acted


def test_a_kept_training_is_shown_before_the_graphs_and_shares_its_objects(versions: list[Version]) -> None:
    model = versions[2].descriptor
    training, file = training_of(model), registered_training(Path(model.dvc_file))
    assert training
    assert training.md5 == model.dvc_training_hash
    assert f"DVC {file} {training.md5}" in printed("models:/agent_r1/3")
    file.rename("elsewhere")
    try:
        assert f"DVC outputs/train/ppo {training.md5}, workspace" in printed("models:/agent_r1/3")
        without_both = trajectory_facts(model, None)
    finally:
        Path("elsewhere").rename(file)
    assert without_both[1] == ("get them", f"where {file} is: in git, or in the clone that trained it")


def of_data(what: str) -> list[int]:
    """The numbers of the versions that are shown below data."""
    return [int(line.split("models:/agent_r1/")[1].split()[0]) for line in printed(what).splitlines() if "s:/" in line]


def test_from_data_to_every_model_that_was_trained_on_it(versions: list[Version]) -> None:
    first, _, third = (version.descriptor for version in versions)
    assert of_data("data/prepared") == of_data("data/prepared/questions.parquet") == of_data("HEAD") == [3]
    assert of_data("HEAD~1") == of_data(git("rev-parse", "--short", "HEAD~2")) == [1, 2]
    assert of_data(first.questions) == of_data(first.questions[:8]) == [1, 2]
    assert of_data(third.data_hash.split("+")[1]) == [3]
    assert of_data("data/prepared/passages.parquet") == [1, 2, 3], "the passages never changed"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("grpo", r"'grpo' is no model, path, hash of data or git revision here; models: models:/agent_r1/1, .*ppo"),
        ("models:/agent_r1/9", "there is no such version; the latest is 3"),
        ("models:/other@champion", "is no reference to a model of this project"),
        ("weights", "weights is there, but models are not trained on it; ask for data/prepared, data/prepared/q"),
        ("abcdef0123", "'abcdef0123' is no model, path, hash"),
    ],
)
def test_what_is_not_there(versions: list[Version], what: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        printed(what)
