"""The pipeline on a small DVC project: order, cached stages, failures, a cancel."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from flows.pipeline import StageFailed, StageUnavailable, ablations, ordered, pipeline, stages

TWO_STAGES = """
stages:
  index:
    cmd: cp prepared.txt index.txt && echo index >> ../order.txt
    deps: [prepared.txt]
    outs: [index.txt]
  prepare:
    cmd: cp source.txt prepared.txt && echo prepare >> ../order.txt
    deps: [source.txt]
    outs: [prepared.txt]
"""
SWEEP = """
stages:
  train:
    matrix: {run: [a, b]}
    wdir: ..
    cmd: cp index.txt ${item.run}.txt && echo ${item.run} >> ../order.txt
    deps: [index.txt]
    outs: ["${item.run}.txt"]
"""


@pytest.fixture(scope="module")
def empty_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], check=True, cwd=folder)
    return folder


@pytest.fixture
def project(
    tmp_path: Path, empty_project: Path, monkeypatch: pytest.MonkeyPatch, write_params: Callable[..., None]
) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(empty_project, folder)
    monkeypatch.chdir(folder)
    (folder / "source.txt").write_text("1")
    (folder / "dvc.yaml").write_text(TWO_STAGES)
    write_params(folder, {})
    return folder


def states(run_flow: Flow[[], None]) -> dict[str, str]:
    """Runs a flow; the name of every task's last state, by stage."""
    state = run_flow(return_state=True)
    assert state.is_completed()
    with get_client(sync_client=True) as client:
        flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        return {task.name: str(task.state_name) for task in client.read_task_runs(flow_run_filter=flow_run)}


def test_stages_run_in_dvcs_order_and_are_cached_afterwards(prefect_api: str, project: Path) -> None:
    assert states(pipeline) == {"prepare": "Completed", "index": "Completed"}
    assert (project.parent / "order.txt").read_text() == "prepare\nindex\n"
    assert states(pipeline) == {"prepare": "Cached", "index": "Cached"}
    assert (project.parent / "order.txt").read_text() == "prepare\nindex\n"


def test_the_sweep_brings_what_it_is_made_of_up_to_date_first(prefect_api: str, project: Path) -> None:
    (project / "ablations").mkdir()
    (project / "ablations" / "dvc.yaml").write_text(SWEEP)
    found = states(ablations)
    assert found == dict.fromkeys(
        ("prepare", "index", "ablations/dvc.yaml:train@a", "ablations/dvc.yaml:train@b"), "Completed"
    )
    done = (project.parent / "order.txt").read_text().split()
    assert done[:2] == ["prepare", "index"]
    assert set(done[2:]) == {"a", "b"}


def test_a_failed_stage_ends_the_pipeline(prefect_api: str, project: Path) -> None:
    (project / "dvc.yaml").write_text(TWO_STAGES.replace("cp source.txt", "exit 3; cp source.txt"))
    with pytest.raises(StageFailed, match="stage prepare failed with exit code"):
        pipeline()
    assert not (project / "index.txt").exists()


def test_a_stage_that_may_work_later_says_so_through_dvc(prefect_api: str, project: Path) -> None:
    command = 'echo tried >> ../order.txt; printf 75 > "$AGENT_R1_EXIT_CODE_FILE"; exit 75'
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"prepare": {"cmd": command}}}))
    with pytest.raises(StageUnavailable, match="stage prepare failed with exit code 75"):
        pipeline()
    assert (project.parent / "order.txt").read_text() == "tried\n" * 3  # operate.retries is 2


def test_files_that_dvc_refuses_are_a_users_fault(project: Path) -> None:
    (project / "dvc.yaml").write_text("stages: {prepare: {command: ls}}")
    with pytest.raises(ValueError, match=r"dvc dag failed: .*dvc\.yaml"):
        stages("dvc.yaml")


def test_a_stage_comes_after_all_it_depends_on() -> None:
    """c needs a and b, b needs a, d stands alone: only a, b, c in this order."""
    dot = 'strict digraph {\n"c";\n"d";\n"a" -> "c";\n"b" -> "c";\n"a" -> "b";\n}\n'
    order = ordered(dot)
    assert [stage for stage in order if stage != "d"] == ["a", "b", "c"]
    assert "d" in order


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_cancel_leaves_no_process(
    prefect_api: str, project: Path, start: Any, number: signal.Signals, code: int
) -> None:
    fifo = project.parent / "started"
    subprocess.run(["mkfifo", str(fifo)], check=True)
    (project / "dvc.yaml").write_text(f"stages: {{train: {{cmd: 'echo $$ > {fifo}; sleep 600; true'}}}}")
    process = start(
        "-c",
        f"import os; os.chdir({str(project)!r}); from flows.__main__ import main; main()",
        "pipeline",
        PREFECT_API_URL=prefect_api,
    )
    shell = int(fifo.read_text())  # blocks until the stage runs
    process.send_signal(number)
    process.communicate()
    assert process.returncode == code
    assert not Path(f"/proc/{shell}").exists()
