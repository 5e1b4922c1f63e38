"""The champion from DVC's own registry, with a real git remote and a real remote of DVC's, and without MLflow."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from agent_r1.files import sha256
from agent_r1.params.places import registered_policy
from agent_r1.tracking import registry
from agent_r1.tracking.registry import Version
from flows.dvc_files import ask_dvc
from flows.operation.promote import _promote, promote_here
from flows.operation.register import keep

ROOT = Path(__file__).parents[3]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def dvc(*arguments: str) -> str:
    done = ask_dvc(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def project(
    tmp_path: Path, write_params: Callable[[Path, dict[str, Any]], None], inside: Callable[..., AbstractContextManager]
) -> Path:
    """A clone of a bare repository, with a remote of DVC's that is its default."""
    folder = tmp_path / "project"
    git("init", "--quiet", "--bare", str(tmp_path / "shared.git"))
    git("clone", "--quiet", str(tmp_path / "shared.git"), str(folder))
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache", "config.local"))
    for file in (".gitignore", ".dvcignore", "dvc.yaml"):
        shutil.copy(ROOT / file, folder / file)
    write_params(folder, {})
    with inside(folder):
        git("config", "user.email", "somebody@example.org")
        git("config", "user.name", "somebody")
        config = (folder / ".dvc/config").read_text().replace("[core]\n", "[core]\n    remote = storage\n")
        (folder / ".dvc/config").write_text(f"{config}['remote \"storage\"']\n    url = {tmp_path / 'storage'}\n")
        git("add", ".")
        git("commit", "--quiet", "-m", "the project")
        yield folder


@pytest.fixture
def registered(project: Path, register_descriptor: Callable[..., Version]) -> Callable[[str], Version]:
    """Registers a policy of these weights as `agent-r1 register` does, and removes its training."""

    def register(weights: str) -> Version:
        policy = project / "outputs/train/ppo/checkpoint/policy"
        policy.mkdir(parents=True, exist_ok=True)
        (policy / "config.json").write_text("{}")
        (policy / "model.safetensors").write_text(weights)
        digest = sha256(policy)
        file = registered_policy("ppo", digest).relative_to(Path())
        version = register_descriptor(digest, dvc_file=str(file), dvc_hash=keep(policy, file))
        shutil.rmtree(project / "outputs/train")
        return version

    return register


def test_a_promoted_policy_is_brought_without_mlflow_from_a_clone_with_a_remote(
    project: Path, registered: Callable[[str], Version], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = registered("the first"), registered("the second")
    (project / "notes.md").write_text("somebody's own")
    git("add", "notes.md")
    promote_here(first.reference, first=True)
    [command] = re.findall(r"^\(git add .*", capsys.readouterr().out, re.MULTILINE)
    assert (project / "models/champion/model.safetensors").read_text() == "the first"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert git("tag", "--list").split() == ["agent_r1#champion#1", "agent_r1@v1.0.0"]
    assert "notes.md" in git("diff", "--cached", "--name-only"), "what somebody is about to commit is left alone"
    _promote(second, expected=registry.champion())
    promote_here(second.reference, tag=True)
    assert "git push --follow-tags" in capsys.readouterr().out
    git("push", "--quiet", "--follow-tags", "origin", "HEAD")

    def brought(*asked: str) -> str:
        dvc("artifacts", "get", str(project.parent / "shared.git"), "agent_r1", "--out", asked[-1], *asked)
        return Path(asked[-1], "model.safetensors").read_text()

    dvc("push", "--quiet", *map(str, Path("models").glob("ppo-*.dvc")))
    shutil.rmtree(".tracking")
    assert brought("--stage", "champion") == "the second"
    assert brought("--rev", "v1.0.0") == "the first"
