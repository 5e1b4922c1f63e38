"""The doctor: the table it prints, and its checks on machines, projects and services that lack something."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.operation.doctor import (
    CHECKS,
    FAILED,
    OK,
    WARNING,
    Finding,
    Warned,
    compare_room,
    compare_versions,
    doctor_of_model,
    finding_of,
)
from tests.cases import cases
from tests.fixtures import ROOT, FreePort, WriteParams

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def project(tmp_path: Path, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DVC project with a graph of one stage, on a machine of four cores; the current folder."""
    folder = tmp_path / "project"
    (folder / ".dvc").mkdir(parents=True)
    (folder / ".dvc" / "config").write_text(f"[core]\n no_scm = true\n site_cache_dir = {tmp_path / 'site'}\n")
    (folder / "dvc.yaml").write_text("stages: {prepare: {cmd: python -m flows prepare}}\n")
    write_params(folder, {})
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    return folder


def test_model_has_one_table_and_one_verdict(
    project: Path,
    tiny_model: Path,
    write_params: WriteParams,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model reads 512 tokens, and states no licence."""
    monkeypatch.setenv("COLUMNS", "400")
    write_params(project, {"env": {"max_tokens": 512}})
    doctor_of_model(str(tiny_model))
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1].split()[:2] == ["ok", "verdict"]
    assert [row.split()[1] for row in rows if row.split()[0] == "warning"] == ["licence"]
    write_params(project, {"env": {"max_tokens": 513}})
    with pytest.raises(SystemExit):
        doctor_of_model(str(tiny_model))
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[1] for row in rows if row.split()[0] == "failed"] == ["window", "verdict"]


def found(check: str) -> Finding:
    return finding_of(CHECKS[check])


def of_another_schema(store: Path) -> None:
    with sqlite3.connect(store) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'feedfacefeed'")


def add_remote(project: Path, **settings: str) -> None:
    config = (project / ".dvc" / "config").read_text().replace("[core]", "[core]\n remote = storage")
    lines = [f" {key} = {value}" for key, value in settings.items()]
    (project / ".dvc" / "config").write_text("\n".join([config, "['remote \"storage\"']", *lines]) + "\n")


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (KeyError("a"), Finding(FAILED, "KeyError: 'a'", "mend the cause that the message names")),
        (ValueError("port 5 is taken; choose another"), Finding(FAILED, "port 5 is taken", "choose another")),
        (Warned("nearly full; free some; or all"), Finding(WARNING, "nearly full", "free some; or all")),
        (TimeoutError("no answer"), Finding(WARNING, "no answer", "ask again once nothing else runs here")),
    ],
)
def test_fault_of_a_check_is_a_finding_with_a_remedy(fault: Exception, finding: Finding) -> None:
    def check() -> str:
        raise fault

    assert finding_of(check) == finding


def test_command_fails_where_anything_failed(tmp_path: Path, write_params: WriteParams, start: Start) -> None:
    write_params(tmp_path, {})
    good = start("-m", "flows", "doctor", "versions", "parameters", COLUMNS="200")
    output, errors = good.communicate()
    assert good.returncode == 0, errors
    assert "params.yaml is valid" in output
    with (tmp_path / "params.yaml").open("a") as file:
        file.write("trian: {}\n")
    bad = start("-m", "flows", "doctor", "parameters", COLUMNS="200")
    output, _ = bad.communicate()
    assert bad.returncode == 1
    assert "trian" in output
    unknown = start("-m", "flows", "doctor", "ports", "disc")
    assert f"there is no check 'disc'; there are {', '.join(CHECKS)}" in unknown.communicate()[1]


@cases("there, status, message")
def test_versions_are_held_against_requirements_and_pins(there: dict[str, str], status: str, message: str) -> None:
    compared = finding_of(
        lambda: compare_versions(["prefect>=3.7.7", "sqlalchemy>=2.0,<2.1"], ["prefect==3.7.7", "ruff==1"], there)
    )
    assert (compared.status, compared.message) == (status, message)


def test_installed_packages_and_params_are_checked(project: Path) -> None:
    assert found("versions").status != FAILED
    assert found("gpu") == Finding(OK, "none here; the CPU samples and learns")
    assert found("parameters").status == OK
    content = yaml.safe_load((project / "params.yaml").read_text())
    content["train"]["credit"]["rewards"]["own"] = {"function": "no_rewards:own", "weight": 0.1}
    (project / "params.yaml").write_text(yaml.safe_dump(content))
    assert found("parameters").message.startswith("credit.rewards.own: module 'no_rewards' cannot be imported (ModuleN")
    content["env"]["tools"]["functions"] = {"own": {"module": "no_tools"}}
    (project / "params.yaml").write_text(yaml.safe_dump(content))
    assert "functions.own: module 'no_tools' cannot be imported" in found("parameters").message
    (project / "params.yaml").write_text("train: {iterations: none}\n")
    assert "params.yaml" in found("parameters").message


@cases("disk, checkpoints, memory, status, message")
def test_room_for_runs(disk: float, checkpoints: list[float], memory: float, status: str, message: str) -> None:
    """On disk: a reserve of 1 GiB, two checkpoints of every run, and a third of the largest: 1 + 2 * 6 + 4."""
    compared = finding_of(lambda: compare_room(disk, checkpoints, memory, 3.5))
    assert (compared.status, compared.message.startswith(message)) == (status, True)


@pytest.mark.slow  # an engine, and two that are waited for
def test_engine_starts_and_samples(project: Path, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch) -> None:
    write_params(project, {"engine": {"kind": "transformers"}})
    assert found("engine").message == "transformers loaded a tiny model and sampled from it"
    (project / "torch.py").write_text("raise ImportError('libtorch.so: cannot open')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(project), str(ROOT)]))
    refused = found("engine")
    assert refused.message == "transformers: its process ended with 1: ImportError: libtorch.so: cannot open"
    assert "`agent-r1 doctor --engine` shows all" in refused.remedy
    assert refused.status == FAILED
    (project / "torch.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr("flows.operation.doctor.ENGINE_TIMEOUT_S", 1.0)
    late = found("engine")
    assert "no answer within 1 s" in late.message
    assert (late.status, late.remedy.partition("; ")[0]) == (WARNING, "ask again once nothing else runs here")
    monkeypatch.setattr("flows.operation.doctor.COMPILING_S", 2.0)
    monkeypatch.setattr("agent_r1.gpus.visible_gpus", lambda: ["0"])
    assert "no answer within 2 s" in found("engine").message, "vLLM may compile there first"


def test_servers_that_are_down_are_a_failure(
    project: Path, write_params: WriteParams, free_port: FreePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    write_params(project, {"engine": {"kind": "server", "server": {"urls": [url]}}})
    assert found("engine").message.startswith(f"the engine server {url} did not answer")
    assert found("engine").remedy.startswith("start it with `VLLM_SERVER_DEV_MODE=1 python -m vllm.")
    monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
    assert found("prefect").message.startswith(f"no Prefect server answers at PREFECT_API_URL {url}/api")
    assert found("prefect").remedy.startswith("start it there")


@pytest.mark.parametrize(
    ("spoil", "message", "remedy"),
    [
        (lambda file: None, "{file}", ""),
        (of_another_schema, "{file} was written by another version of MLflow", "mlflow db upgrade sqlite:///{file}"),
        (lambda file: file.write_bytes(b"half a page" * 1000), "{file} cannot be used", "move it away"),
    ],
)
def test_store_is_checked(project: Path, spoil: Callable[[Path], None], message: str, remedy: str) -> None:
    """Each is a store that this process has not opened yet: MLflow looks at a schema once."""
    file = project / ".tracking/mlflow.db"
    spoil(file)
    opened = found("store")
    assert opened.message.startswith(message.format(file=file))
    assert remedy.format(file=file) in opened.remedy
    assert (opened.status == OK) == (remedy == "")


def test_versions_that_store_lacks_are_a_warning(project: Path, register_descriptor: Callable[..., Any]) -> None:
    assert found("registered").status == OK
    for file, policy in (("register/ppo.json", "a" * 64), ("ablations/register/ppo-seed3.json", "b" * 64)):
        (project / "outputs" / file).parent.mkdir(parents=True)
        (project / "outputs" / file).write_text(json.dumps({"version": "models:/agent_r1/1", "policy": policy}))
    lacking = found("registered")
    assert "the store lacks the versions of outputs/register/ppo.json, " in lacking.message
    assert lacking.message.endswith(", outputs/ablations/register/ppo-seed3.json")
    register_descriptor("a" * 64)
    assert found("registered").remedy == "agent-r1 register ablations/ppo-seed3"


def test_open_folder_of_pickles_is_a_warning(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_R1_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "global"))
    monkeypatch.delenv("DVC_SITE_CACHE_DIR")
    (project / ".dvc" / "config").write_text("[core]\n no_scm = true\n")
    open_to_all = found("dvc_cache")
    assert (open_to_all.status, "others may write to /var/tmp/dvc" in open_to_all.message) == (WARNING, True)
    subprocess.run([sys.executable, "-m", *open_to_all.remedy.split()], check=True)
    named = found("dvc_cache")
    assert (named.status, str(tmp_path / "locks" / "dvc") in named.message) == (OK, True)
    (project / "open").mkdir()
    (project / "open").chmod(0o777)
    (project / ".dvc" / "config").write_text(f"[core]\n no_scm = true\n site_cache_dir = {project / 'open'}\n")
    assert found("dvc_cache").status == WARNING


def test_remote_that_is_missing_not_mounted_or_not_verified_is_a_warning(project: Path, tmp_path: Path) -> None:
    missing = found("dvc")
    assert (missing.status, "there is no remote" in missing.message) == (WARNING, True)
    assert "dvc remote add -d storage URL" in missing.remedy
    add_remote(project, url=str(tmp_path / "storage"))
    assert found("dvc").message.endswith("storage, which does not exist")
    (tmp_path / "storage").mkdir()
    assert found("dvc").remedy == "dvc remote modify storage verify true"
    with (project / ".dvc" / "config").open("a") as file:
        file.write(" verify = true\n")
    assert found("dvc").message.endswith("answers; 0 files wait for `dvc push`")


def test_silent_remote_is_a_failure(project: Path, free_port: FreePort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (project / "data").write_text("rows")
    (project / "data.dvc").write_text("outs:\n- md5: df347a373b8f92aa0ae3dd920a5ec2f6\n  hash: md5\n  path: data\n")
    add_remote(project, url="s3://agents/any", verify="true", endpointurl=f"http://127.0.0.1:{free_port()}")
    refused = found("dvc")
    assert refused.status == FAILED
    assert "cannot be used: unexpected error - Could not connect to the endpoint URL" in refused.message


def test_code_of_another_clone_is_noticed_and_that_of_an_overlays_folder_is_the_projects(project: Path) -> None:
    assert found("code") == Finding(OK, f"of {ROOT}"), "a project without code of its own"
    (project / "agent_r1").symlink_to(ROOT / "agent_r1")
    assert found("code").status == OK
    (project / "agent_r1").unlink()
    (project / "agent_r1").mkdir()
    said = found("code")
    assert (said.status, said.message) == (FAILED, f"this is the code of {ROOT}, and not of {project}")
    assert "`make doctor`" in said.remedy
