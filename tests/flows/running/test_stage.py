"""A stage's process: plain without a server, tracked with one; its threads, its memory, and how it ends."""

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect import flow
from prefect import task as prefect_task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, TaskRunFilter, TaskRunFilterFlowRunId
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.context import TaskRunContext
from prefect.states import Cancelled, Cancelling, Failed

from agent_r1.params import SHIPPED
from agent_r1.params.places import RunId
from agent_r1.rollout import vllm_engine
from flows.evaluate import EvaluationRequest
from flows.stage import PARENT_TASK_RUN, clean_end, run_stage, shown_name, task
from tests.cases import cases

SCRIPT = """
import gc, logging, os, signal, sys
from flows.stage import clean_end, prepare_process, run_stage

logger = logging.getLogger("flows.script")

def refused(run):
    raise ValueError(f"run {run!r} is not defined in http://me:secret@host/; add it to params.yaml")

def unavailable(run):
    raise ConnectionError("no answer")

def untracked(run):
    from agent_r1 import tracking
    tracking.start(run, {}, {})

def missing(run):
    open("not/there")

def unfit(run):
    from agent_r1.rollout.sampling import EngineError
    raise EngineError("no model can be loaded")

def broken(run):
    assert run == "x", "an invariant of http://me:secret@ours"

def interrupted(run):
    os.kill(os.getpid(), signal.SIGINT)

def terminated(run):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        logger.info("cleaned up")

def plain(run):
    logger.info("run %s, prefect imported: %s", run, "prefect" in sys.modules)
    logging.getLogger("some_library").info("chatter")
    logger.info("garbage after %d objects", gc.get_threshold()[0])

if __name__ == "__main__":
    prepare_process()
    assert gc.get_threshold()[0] > 10_000
    with clean_end():
        run_stage(globals()[sys.argv[1]], run="ppo")
"""


def test_name_of_stage_leaves_out_where_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate() -> None: ...

    given = {"run": None, "seed": 0, "sweep": "", "model": "models:/agent_r1/2", "fresh": False, "into": "outputs/x"}
    assert shown_name(evaluate, given) == "evaluate 0 models:/agent_r1/2"
    monkeypatch.setenv("DVC_EXP_NAME", "slow")
    assert shown_name(evaluate, {**given, "fresh": True}) == "evaluate 0 models:/agent_r1/2 fresh (slow)"


@cases("stage, environment, code, said")
def test_end_has_a_code_and_a_reason(
    start: Any, tmp_path: Path, stage: str, environment: dict[str, str], code: int, said: list[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "params.yaml").touch()
    process = start("script.py", stage, **environment)
    _, errors = process.communicate()
    assert process.returncode == code
    assert all(each in errors for each in said), errors
    assert "chatter" not in errors
    assert "secret" not in errors
    assert ("Traceback" in errors) == (stage == "broken" or "AGENT_R1_TRACEBACK" in environment)
    if stage in ("unavailable", "missing", "unfit"):
        assert len(errors.splitlines()) == 1


THREADS = """
import json, sys
from flows.stage import prepare_process

early = sorted({"numpy", "torch", "faiss"} & set(sys.modules))
prepare_process()
import faiss, numpy, torch
from threadpoolctl import threadpool_info
blas = [each["num_threads"] for each in threadpool_info() if "numpy" in each["filepath"]]
print(json.dumps([early, torch.get_num_threads(), faiss.omp_get_max_threads(), *blas]))
"""


def test_torch_faiss_and_numpy_follow_the_knob_whatever_the_environment_says(start: Any, tmp_path: Path) -> None:
    content = yaml.safe_load(SHIPPED.read_text())
    content["model"]["threads"] = 1
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(content))
    said, _ = start(
        "-c", THREADS, **{f"{library}_NUM_THREADS": "2" for library in ("OMP", "MKL", "OPENBLAS")}
    ).communicate()
    assert json.loads(said) == [[], 1, 1, 1], "nothing is imported before it is set, and all follow it"


def test_engines_process_has_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert vllm_engine.engine_environment(1, tmp_path, {})["OMP_NUM_THREADS"] == "1"


ALLOCATOR = """
from flows.stage import prepare_process

prepare_process()
from pathlib import Path
from torch._C import _accelerator_getAllocatorSettings
from agent_r1.rollout.vllm_engine import engine_environment

own = engine_environment(1, Path("."), {})
print(_accelerator_getAllocatorSettings(), own.get("PYTORCH_ALLOC_CONF"), own.get("PYTORCH_CUDA_ALLOC_CONF"))
"""


@cases("given, said")
def test_learners_memory_grows_in_segments_unless_told_otherwise(start: Any, given: dict[str, str], said: str) -> None:
    """The older of the variable's two names comes first in torch. vLLM gets the user's own alone."""
    output, _ = start("-c", ALLOCATOR, **given).communicate()
    assert output.strip() == said


@task
def squared(values: list[int]) -> list[int]:
    return [value * value for value in values]


@task
def rolled(iteration: int) -> int:
    return iteration


@pytest.fixture
def tracked(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes run_stage track, and undoes what it does to this process."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    handler, logger = signal.getsignal(signal.SIGTERM), logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield
    signal.signal(signal.SIGTERM, handler)
    logger.handlers, logger.level = handlers, level


def runs_of(name: str) -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=[name])))


def completed_tasks(run: FlowRun, count: int) -> list[TaskRun]:
    """The task runs of a flow run, which the server records a moment after they happened."""
    task_filter = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[run.id]))
    with get_client(sync_client=True) as client:
        for _ in range(100):
            runs = client.read_task_runs(task_run_filter=task_filter)
            completed = [task_run for task_run in runs if task_run.state_name == "Completed"]
            if len(completed) == count:
                return completed
            time.sleep(0.1)
    raise AssertionError(f"expected {count} completed task runs, found {completed}")


@pytest.mark.usefixtures("tracked")
def test_with_a_server_the_stage_is_a_flow_and_its_parts_are_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "slow")
    results: list[object] = []

    def toy_stage(asked: EvaluationRequest) -> None:
        results.append(squared([1, 2]))
        results.append([rolled(7)])
        results.append(asked)

    asked = EvaluationRequest(RunId("ppo", 3), into=Path("elsewhere"))
    run_stage(toy_stage, asked=asked)
    assert results == [[1, 4], [7], asked]
    (run,) = runs_of("toy_stage")
    assert run.name == "toy_stage ppo 3 (slow)"
    values = {name: value for name, value in run.parameters.items() if value}
    assert values == {"run": "ppo", "seed": 3, "into": "elsewhere"}
    assert run.state_name == "Completed"
    assert {task_run.name for task_run in completed_tasks(run, 2)} == {"squared", "rolled 7"}


@pytest.mark.usefixtures("tracked")
def test_failed_stage_is_a_failed_flow_and_exit_code_1() -> None:
    def refusing_stage() -> None:
        raise ValueError("no such run")

    with pytest.raises(SystemExit) as ended, clean_end():
        run_stage(refusing_stage)
    assert ended.value.code == 1
    (run,) = runs_of("refusing_stage")
    assert run.state_name == "Failed"


@prefect_task
def own_ids() -> tuple[str, UUID]:
    context = TaskRunContext.get()
    return str(context.task_run.id), context.task_run.flow_run_id


@flow
def parent_flow() -> tuple[str, UUID]:
    return own_ids()


@pytest.mark.usefixtures("tracked")
@pytest.mark.parametrize(
    ("whole", "part"), [(Cancelling(), "Cancelled"), (Cancelled(), "Cancelled"), (Failed(), "Crashed")]
)
def test_ended_stage_of_cancelled_run_is_cancelled(monkeypatch: pytest.MonkeyPatch, whole: State, part: str) -> None:
    name = f"ended_stage_{part}_{whole.type.value}"

    def ended_stage() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    ended_stage.__name__ = name
    parent, parent_run = parent_flow()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(parent_run, whole, force=True)
    monkeypatch.setenv(PARENT_TASK_RUN, parent)
    with pytest.raises(SystemExit) as ended, clean_end():
        run_stage(ended_stage)
    assert ended.value.code == 143
    (run,) = runs_of(name)
    assert (run.state_name, str(run.parent_task_run_id)) == (part, parent)
