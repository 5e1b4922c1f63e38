"""A stage's command as a task, and the pipeline on a small DVC project: order, cached stages, failures, a cancel."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from prefect import Flow, flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.graph import StageFailed, StageUnavailable, stages
from flows.operation.serving import require_server
from flows.pipeline import ablations, pipeline, run_command, run_pipeline
from flows.processes import Supervised, api_on, await_health, running
from tests.cases import cases, graph
from tests.fixtures import WriteParams
from tests.flows.conftest import STAGE_THAT_STAYS

NEWER = "3.9.1"  # of Prefect, whose fastapi vLLM 0.32 refuses

# Stands in for a stage: counts its attempts, then does what its argument says.
STAGE = """
import pathlib, sys, time

attempts = pathlib.Path("attempts")
attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
print("attempt", len(attempts.read_text()), flush=True)
codes = [int(code) for code in sys.argv[2].split(",")]
code = codes[min(len(attempts.read_text()), len(codes)) - 1]
if code < 0:
    time.sleep(600)
sys.exit(code)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_params: WriteParams) -> Path:
    """A folder whose own `python -m flows` is the stand-in."""
    monkeypatch.chdir(tmp_path)
    write_params(tmp_path, {})
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").touch()
    (tmp_path / "flows" / "__main__.py").write_text(STAGE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path


@flow
def stage(codes: str) -> None:
    run_command("train", codes)


def attempts(stand_in: Path) -> int:
    return len((stand_in / "attempts").read_text())


@cases("codes, count, fault, said")
def test_unavailable_stage_is_retried_and_failed_one_is_not(
    prefect_api: str, stand_in: Path, caplog: Any, codes: str, count: int, fault: str, said: str
) -> None:
    kind = {"StageFailed": StageFailed, "StageUnavailable": StageUnavailable}.get(fault)
    raised = pytest.raises(kind, match=said) if kind else nullcontext()
    with caplog.at_level(logging.INFO, logger="flows.pipeline"), raised:
        stage(codes)
    assert attempts(stand_in) == count
    assert f"attempt {count}" in caplog.messages  # its lines are logged as they come


def test_stage_that_takes_too_long_is_ended_once(prefect_api: str, stand_in: Path, write_params: WriteParams) -> None:
    write_params(stand_in, {"operate": {"timeouts_s": {"train": 1.5}}})
    with pytest.raises(StageFailed, match=r"train took longer than 1\.5 s .* raise operate\.timeouts_s\.train"):
        stage("-1")
    assert attempts(stand_in) == 1


@pytest.fixture(scope="module")
def empty_project(tmp_path_factory: pytest.TempPathFactory, lay_dvc: Callable[..., None]) -> Path:
    folder = tmp_path_factory.mktemp("empty")
    lay_dvc(folder)
    return folder


@pytest.fixture
def project(tmp_path: Path, empty_project: Path, monkeypatch: pytest.MonkeyPatch, write_params: WriteParams) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(empty_project, folder)
    monkeypatch.chdir(folder)
    (folder / "source.txt").write_text("1")
    (folder / "dvc.yaml").write_text(graph("two_stages"))
    write_params(folder, {})
    return folder


def states(run_flow: Flow[..., None]) -> dict[str, str]:
    """Runs a flow; the name of every task's last state, by stage."""
    state = run_flow(return_state=True)
    assert state.is_completed()
    with get_client(sync_client=True) as client:
        flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        for _ in range(100):  # events bring a task's states to the server, which takes a moment
            names = {task.name: str(task.state_name) for task in client.read_task_runs(flow_run_filter=flow_run)}
            if {*names.values()} <= {"Completed", "Cached"}:
                return names
            time.sleep(0.1)
    raise AssertionError(names)


def test_stages_run_in_order_are_cached_and_need_no_server_then(
    prefect_api: str, project: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, logger="flows.pipeline"):
        assert states(pipeline) == {"prepare": "Completed", "index": "Completed"}
    stages_done = [message.partition(", ")[0] for message in caplog.messages if " is done: " in message]
    assert stages_done == ["stage prepare is done: 1 of 2", "stage index is done: 2 of 2"]
    assert "Updating lock file" not in caplog.text
    assert (project.parent / "order.txt").read_text() == "prepare\nindex\n"
    assert states(pipeline) == {"prepare": "Cached", "index": "Cached"}
    assert (project.parent / "order.txt").read_text() == "prepare\nindex\n"
    monkeypatch.setattr("flows.processes.prefect_server", lambda: pytest.fail("a server was started"))
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="flows.pipeline"):
        run_pipeline()
    assert caplog.messages == ["everything is up to date"]


@pytest.fixture(scope="module")
def newer_prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API URL of a Prefect server of another minor version, from an environment of its own."""
    folder = tmp_path_factory.mktemp("newer")
    uv, python = (sys.executable, "-m", "uv"), folder / ".venv/bin/python"
    subprocess.run([*uv, "venv", "-q", folder / ".venv"], check=True)
    installing = [*uv, "pip", "install", "-q", "--python", python, f"prefect=={NEWER}"]
    if (installed := subprocess.run(installing, capture_output=True, text=True)).returncode:
        pytest.skip(f"Prefect {NEWER} cannot be installed here: {installed.stderr}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = api_on(port := free.getsockname()[1])
    command = [python, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "PREFECT_HOME": str(folder / "home")}
    log, health = folder / "log", f"{url}/health"
    part = Supervised(name="other", command=[*map(str, command)], environment=environment, log=log, health=health)
    with running(part) as (_, server):
        await_health(server, part)
        yield url


def test_other_minor_version_runs_pipeline(newer_prefect: str, project: Path, caplog: pytest.LogCaptureFixture) -> None:
    require_server(newer_prefect)
    assert f"is Prefect {NEWER}, and this project has {version('prefect')}; where they misunderstand" in caplog.text
    command = [sys.executable, "-c", "from flows.pipeline import pipeline; pipeline()"]
    for _ in range(2):  # in processes of their own: this one sends its events to another server
        subprocess.run(command, env={**os.environ, "PREFECT_API_URL": newer_prefect}, check=True)
    with temporary_settings({PREFECT_API_URL: newer_prefect}), get_client(sync_client=True) as client:
        assert [run.name for run in client.read_flow_runs()] == ["pipeline"] * 2
        tasks = [(task.name, task.state_name) for task in client.read_task_runs()]
    assert sorted(tasks) == [(name, state) for name in ("index", "prepare") for state in ("Cached", "Completed")]


def test_sweep_brings_its_inputs_up_to_date_first(prefect_api: str, project: Path) -> None:
    (project / "ablations").mkdir()
    (project / "ablations" / "graph.yaml").write_text(graph("two_runs"))
    states_found = states(ablations)
    assert states_found == dict.fromkeys(
        ("prepare", "index", "ablations/dvc.yaml:train@a", "ablations/dvc.yaml:train@b"), "Completed"
    )
    order = (project.parent / "order.txt").read_text().split()
    assert order[:2] == ["prepare", "index"]
    assert set(order[2:]) == {"a", "b"}


def test_stages_that_are_ready_run_side_by_side(prefect_api: str, project: Path) -> None:
    """Each of the two ends only once the other has begun. The third is alone: its threads look for each other."""
    looks = "echo {own} $GOMP_SPINCOUNT >> ../looks.txt"
    meet = "echo > ../{own}.begun && until [ -e ../{other}.begun ]; do sleep .1; done; echo {own} > {own}.txt; " + looks
    definitions: dict[str, dict[str, Any]] = {
        own: {"cmd": meet.format(own=own, other=other), "outs": [f"{own}.txt"]}
        for own, other in (("prepare", "index"), ("index", "prepare"))
    }
    both = ["prepare.txt", "index.txt"]
    join = "cat prepare.txt index.txt > report.txt; " + looks.format(own="report")
    definitions["report"] = {"cmd": join, "deps": both, "outs": ["report.txt"]}
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": definitions}))
    assert states(pipeline) == dict.fromkeys(("prepare", "index", "report"), "Completed")
    assert (project / "report.txt").read_text() == "prepare\nindex\n"
    assert sorted((project.parent / "looks.txt").read_text().splitlines()) == ["index", "prepare", "report 3000"]
    (project / "index.txt").unlink()
    assert states(pipeline) == {"prepare": "Cached", "index": "Completed", "report": "Completed"}  # DVC skips it


def test_failed_stage_lets_others_end_alone(prefect_api: str, project: Path, caplog: pytest.LogCaptureFixture) -> None:
    definitions: dict[str, dict[str, Any]] = {
        "prepare": {"cmd": "until [ -e ../failed ]; do sleep .1; done; sleep 2; echo > prepare.txt"},
        "index": {"cmd": "touch ../failed && exit 3"},
        "report": {"cmd": "touch ../begun", "deps": ["prepare.txt"]},
    }
    definitions["prepare"]["outs"] = ["prepare.txt"]
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": definitions}))
    with pytest.raises(StageFailed, match="stage index failed with exit code"):
        pipeline()
    assert "the system killed it, as it does when memory runs out; what was begun goes on to its end" in caplog.text
    assert "prepare" in yaml.safe_load((project / "dvc.lock").read_text())["stages"]
    assert not (project.parent / "begun").exists()


def test_stage_that_may_work_later_says_so_through_dvc(prefect_api: str, project: Path) -> None:
    command = 'echo tried >> ../order.txt; printf 75 > "$AGENT_R1_EXIT_CODE_FILE"; exit 75'
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"prepare": {"cmd": command}}}))
    with pytest.raises(StageUnavailable, match="stage prepare failed with exit code 75"):
        pipeline()
    assert (project.parent / "order.txt").read_text() == "tried\n" * 3  # operate.retries is 2


@cases("graph, runs, said")
def test_unusable_files_named(project: Path, write_params: WriteParams, graph: str, runs: list[str], said: str) -> None:
    (project / "dvc.yaml").write_text(graph)
    write_params(project, {"repro_runs": runs})
    with pytest.raises(ValueError, match=said):
        stages("dvc.yaml")


@cases("killed, code, said")
def test_killed_part_of_pipeline_ends_others(project: Path, start_in: Any, killed: str, code: int, said: str) -> None:
    fifo, stage = project.parent / "began", project.parent / "stay.py"
    subprocess.run(["mkfifo", str(fifo)], check=True)
    stage.write_text(STAGE_THAT_STAYS)
    (project / "dvc.yaml").write_text(f"stages: {{train: {{cmd: '{sys.executable} {stage} {fifo}; true'}}}}")
    pipeline = start_in(project, "pipeline")
    assert fifo.read_text()
    children = psutil.Process(pipeline.pid).children(recursive=True)  # its server, DVC, a shell and the stage
    [victim] = [process for process in (psutil.Process(pipeline.pid), *children) if killed in process.cmdline()]
    victim.kill()
    assert said in pipeline.communicate(timeout=60)[1]
    assert pipeline.returncode == code
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert {process.name for process in project.parent.iterdir()} & {"began", "stay.py", "project"}
    assert not [*project.parent.glob("tmp*"), *project.parent.glob("*exit_code*")]


def test_cancel_leaves_no_process(prefect_api: str, project: Path, start_in: Any) -> None:
    fifo = project.parent / "started"
    subprocess.run(["mkfifo", str(fifo)], check=True)
    (project / "dvc.yaml").write_text(f"stages: {{train: {{cmd: 'echo $$ > {fifo}; sleep 600; true'}}}}")
    process = start_in(project, "pipeline", PREFECT_API_URL=prefect_api)
    shell = int(fifo.read_text())  # blocks until the stage runs
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert not Path(f"/proc/{shell}").exists()
