"""DVC's remotes, used as docs/registry.md says: a folder, and a bucket of a real S3 server on loopback."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import boto3
import pytest
import yaml

from agent_r1.files import sha256
from flows.dvc_files import DVC
from flows.project import begin_project
from tests.answering import process_of
from tests.fixtures import ROOT, FreePort

BUCKET = "agents"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",  # a server that is down is asked once
}
TRACKED = ["prepare", "index", "warm_start", "train@ppo"]


def dvc(project: Path, *arguments: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment = {**kept, "AWS_EC2_METADATA_DISABLED": "true", "HOME": str(project), **ENVIRONMENT}
    done = subprocess.run([*DVC, *arguments], cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory, free_port: FreePort) -> Iterator[str]:
    command = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(port := free_port())]
    with process_of(command, f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("s3"), "/moto-api/") as url:
        s3 = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
        )
        s3.create_bucket(Bucket=BUCKET)
        yield url


def new_project(folder: Path) -> None:
    """What `dvc init --no-scm` leaves, under the settings of this project."""
    (folder / ".dvc").mkdir(parents=True)
    shutil.copy(ROOT / ".dvc" / "config", folder / ".dvc")
    (folder / ".dvc" / "config.local").write_text(f"[core]\n no_scm = true\n site_cache_dir = {folder / 'site'}\n")


def use(settings: dict[str, str], project: Path) -> None:
    """What `dvc remote add -d storage URL` and `dvc remote modify storage NAME VALUE` write."""
    file, config = project / ".dvc" / "config", ConfigParser()
    config.read(file)
    config["core"]["remote"] = "storage"
    config["'remote \"storage\"'"] = settings
    with file.open("w") as written:
        config.write(written)


def test_bare_pull_brings_all_and_knows_no_sweep_that_was_not_trained(tmp_path: Path) -> None:
    project, clone = tmp_path / "project", tmp_path / "clone"
    for folder in (project, clone):
        new_project(folder)
        use({"url": str(tmp_path / "storage"), "verify": "true"}, folder)
        (folder / "ablations").mkdir()
    for name, content in {"checkpoint/policy/model": b"\0\1" * 5000, "credit/000": b"rows", "metrics": b"{}\n"}.items():
        (project / "ppo" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "ppo" / name).write_bytes(content)
    dvc(project, "add", "--quiet", "ppo")
    for file, stage in {
        "dvc.yaml": {"cmd": "echo rows > rows", "outs": ["rows"]},
        "ablations/graph.yaml": {"wdir": "..", "cmd": "echo member > member", "outs": ["member"]},
    }.items():
        (project / file).write_text(yaml.safe_dump({"stages": {"made": stage}}))
    dvc(project, "repro", "--quiet")
    dvc(project, "push")
    for name in ("ppo.dvc", "dvc.yaml", "dvc.lock", "ablations/graph.yaml"):
        shutil.copy(project / name, clone / name)
    dvc(clone, "pull")
    assert (clone / "rows").read_text() == "rows\n"
    assert sha256(clone / "ppo") == sha256(project / "ppo")
    assert dvc(clone, "status") == "Data and pipelines are up to date.\n"


@pytest.mark.parametrize("file", ["dvc.yaml", "ablations/graph.yaml"])
def test_every_output_of_the_graph_but_what_git_keeps_is_cached_and_so_is_pushed(file: str) -> None:
    stages = yaml.safe_load((ROOT / file).read_text())["stages"]
    for name, stage in stages.items():
        definition = stage.get("do", stage)
        outputs = [out for kind in ("outs", "metrics", "plots") for out in definition.get(kind, [])]
        assert outputs, name
        for path, settings in (each for out in outputs if isinstance(out, dict) for each in out.items()):
            is_for_git = any(part in path for part in ("/register/", "/scores", "/curves"))
            assert settings.get("cache", True) != is_for_git, path
            assert settings.get("push", True), path


def test_outputs_of_graph_go_to_another_clone(tmp_path: Path, small_project: Path, ppo: Path, endpoint: str) -> None:
    """The graph of a project of one's own, in a git repository and its clone, through a bucket."""
    project, clone = tmp_path / "project", tmp_path / "clone"
    begin_project(project)
    shutil.copy(small_project / "params.yaml", project)
    for made in ("data/prepared", "data/index", "outputs/warm_start", ppo.relative_to(small_project)):
        shutil.copytree(small_project / made, project / made)
    dvc(project, "config", "--local", "core.site_cache_dir", str(tmp_path / "site"))
    use({"url": f"s3://{BUCKET}/{tmp_path.name}", "verify": "true", "endpointurl": endpoint}, project)
    dvc(project, "commit", "--force", "--quiet", *TRACKED)
    git(project, "add", ".")
    git(project, "commit", "--quiet", "--message", "trained")
    dvc(project, "push", *TRACKED)

    git(tmp_path, "clone", "--quiet", str(project), str(clone))
    dvc(clone, "config", "--local", "core.site_cache_dir", str(tmp_path / "other_site"))
    assert not (clone / "data" / "prepared").exists()
    dvc(clone, "pull", *TRACKED)
    for made in ("data/prepared", "data/index", "outputs/warm_start", "outputs/train/ppo"):
        assert sha256(clone / made) == sha256(project / made), made
    assert "up to date" in dvc(clone, "status", *TRACKED)


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=agent", "-c", "user.email=agent@localhost"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)
