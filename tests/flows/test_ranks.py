"""Trainings whose learner is shared by processes: as with one, and none is left when one is lost; a stage's code."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import HashStore

from agent_r1.devices.meeting import KEY, own_gpu, require_apart
from agent_r1.files import sha256
from agent_r1.params import Params, load
from agent_r1.params.places import RunId
from agent_r1.params.sections import override
from agent_r1.params.stages import LearnerParams
from agent_r1.records import Trajectory
from agent_r1.tables import read_rows
from flows.ranks import Watch, code_of, fault_of, following, given_place, shortfalls
from flows.stage import accelerator
from tests.fixtures import PARAMS, PLACES, WriteParams

Start = Callable[..., subprocess.Popen[str]]

TRAIN = ("-m", "flows", "train", "--run", "ppo")
RUN = PLACES.training(RunId("ppo"))
WEIGHTS = "checkpoint/policy/model.safetensors"
WARM_START = "outputs/warm_start/model.safetensors"
TIMEOUT_S = 300.0


@pytest.fixture
def fresh(tmp_path: Path, small_project: Path, write_params: WriteParams) -> Path:
    """The project before training, with a learner that two processes share; `start` starts processes there."""
    write_params(tmp_path, {"learner": {"processes": 2, "silence_s": 15.0}})
    for part in ("data", "outputs/warm_start"):
        shutil.copytree(small_project / part, tmp_path / part)
    return tmp_path


def follower_of(process: subprocess.Popen[str], reached: Path) -> psutil.Process:
    """The other rank of a training that has come as far as a file."""
    deadline = time.monotonic() + TIMEOUT_S
    while not reached.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{reached} does not appear"
        time.sleep(0.002)
    [found] = psutil.Process(process.pid).children()
    return found


def sampled(run: Path) -> list[bytes]:
    files = sorted((run / "trajectories").glob("*.parquet"))
    return [row.token_ids.tobytes() for file in files for row in read_rows(file, Trajectory)]


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Between all weights: rounding may turn a step of Adam's where a gradient is nearly 0, and no more."""
    return math.sqrt(sum((left[name] - weight).square().sum().item() for name, weight in right.items()))


def test_two_ranks_train_as_one_does_whatever_happens_to_them(fresh: Path, ppo: Path, start: Start) -> None:
    """A rank that is stopped ends them with 75, a leader that is killed leaves no rank, and then they go on.

    To what one comes to that was left alone, token for token.
    """
    run = fresh / RUN
    leader = start(*TRAIN)
    follower_of(leader, run / "trajectories/000.parquet").send_signal(signal.SIGSTOP)
    errors = leader.communicate(timeout=TIMEOUT_S)[1]
    assert (leader.returncode, "rank 1 gives no sign of life any more" in errors) == (75, True), errors

    leader = start(*TRAIN)
    follower = follower_of(leader, run / "trajectories/001.parquet")
    leader.kill()
    follower.wait(TIMEOUT_S)

    leader = start(*TRAIN)
    errors = leader.communicate(timeout=TIMEOUT_S)[1]
    assert leader.returncode == 0, errors
    assert "2 ranks share the learner" in errors
    assert "going on after 1 finished iterations" in errors
    assert sampled(run) == sampled(ppo)
    untrained, ours, theirs = (load_file(path) for path in (fresh / WARM_START, run / WEIGHTS, ppo / WEIGHTS))
    assert distance(ours, theirs) < 0.01 * distance(untrained, theirs)


def has_rank(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # another child of the leader's, which has ended
        return bool(process.environ().get("RANK"))
    return False


def test_a_rank_that_is_stopped_before_all_have_met_is_missed(
    fresh: Path, write_params: WriteParams, start: Start
) -> None:
    """As soon as it has been stopped for as long as a rank may be silent, and not after the time to meet."""
    write_params(fresh, {"learner": {"processes": 2, "silence_s": 5.0}})
    leader = start(*TRAIN)
    deadline = time.monotonic() + TIMEOUT_S
    while not (begun := [each for each in psutil.Process(leader.pid).children() if has_rank(each)]):
        assert leader.poll() is None, leader.communicate()[1]
        assert time.monotonic() < deadline, "no rank is started"
        time.sleep(0.002)
    begun[0].send_signal(signal.SIGSTOP)
    errors = leader.communicate(timeout=TIMEOUT_S)[1]
    assert (leader.returncode, "rank 1 gives no sign of life any more" in errors) == (75, True), errors
    assert not begun[0].is_running()


def test_a_place_that_the_parameters_do_not_ask_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def learner(processes: int, nodes: int = 1) -> LearnerParams:
        return LearnerParams(processes=processes, nodes=nodes, silence_s=60.0, optimizer_offload=False)

    assert given_place(learner(1)) is None
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(ValueError, match=f"learner.processes is {cores + 1}, and there are {cores} cores here"):
        given_place(learner(cores + 1))
    with pytest.raises(ValueError, match=r"learner.nodes is 2, .*torchrun --nnodes 2 --nproc-per-node 1 "):
        given_place(learner(1, nodes=2))
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    for name, value in (variables | {KEY: ""}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"give all of them the same: export {KEY}="):
        given_place(learner(1, nodes=2))
    variables[KEY] = "k" * 32
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = given_place(learner(1, nodes=2))
    assert place is not None
    assert place.environment == variables
    with pytest.raises(ValueError, match=r"rank 1 of 2, on its machine 0, and learner asks for 1 processes on 1"):
        given_place(learner(1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # as a launcher binds each rank
    assert given_place(learner(2)) == place


@pytest.mark.parametrize(
    ("gpus", "learner", "engine", "lacking"),
    [
        (8, {"processes": 8}, {"kind": "vllm"}, "8 GPUs learn, .* on 1 of them; .* engine.vllm.replicas: 8"),
        (8, {"processes": 8}, {"kind": "vllm", "tensor_parallel_size": 2}, "on 2 of them; .*replicas: 4"),
        (8, {"processes": 8}, {"kind": "vllm", "tensor_parallel_size": 3, "replicas": 2}, ""),
        (8, {"processes": 8}, {"kind": "transformers"}, "on 1 of them; set engine.kind: vllm and"),
        (8, {"processes": 8}, {"kind": "vllm", "replicas": 0}, ""),
        (8, {"processes": 8, "nodes": 2}, {"kind": "vllm", "replicas": 8}, "16 .* 8 of them; set engine.kind: server"),
        (1, {"processes": 8}, {"kind": "vllm"}, "on 1 of them; set engine.kind: server, with one on each"),
        (8, {"processes": 8, "nodes": 2}, {"kind": "server"}, ""),
        (0, {"processes": 2}, {"kind": "vllm"}, ""),
    ],
)
def test_gpus_that_learn_and_do_not_sample_are_named(
    gpus: int, learner: dict[str, int], engine: dict[str, Any], lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    told = list(shortfalls(settings_of(learner, engine)))
    assert len(told) == bool(lacking)
    assert re.search(lacking, "".join(told))


def settings_of(learner: dict[str, int], engine: dict[str, Any], **model: Any) -> Params:
    base, vllm = load(PARAMS), {key: value for key, value in engine.items() if key != "kind"}
    server = {"urls": ["http://127.0.0.1:8001"] if engine["kind"] == "server" else []}
    changes = {"engine": {"kind": engine["kind"], "vllm": vllm, "server": server}, "learner": learner, "model": model}
    return Params.model_validate(override(base.model_dump(), changes))


def test_a_task_of_slurms_that_is_bound_to_one_core_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `srun` binds it: a leader and eight engines, or the threads of the built-in model, on one core."""
    [core, *_] = allowed = os.sched_getaffinity(0)
    engines = settings_of({"processes": 8}, {"kind": "vllm", "replicas": 8})
    threads = settings_of({}, {"kind": "vllm"}, threads=2)
    os.sched_setaffinity(0, {core})
    try:
        [told] = shortfalls(threads)
        assert told.startswith(f"2 processes or threads share the 1 of {os.cpu_count()} cores that are allowed here; ")
        monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
        assert "9 processes or threads share the 1 of" in next(shortfalls(engines))
        assert "`srun --cpus-per-task 9`" in next(shortfalls(engines))
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        (-signal.SIGKILL, ChildProcessError, "rank 2 was lost, by signal 9"),
        (75, ChildProcessError, "rank 2 was lost, by exit code 75"),
        (1, ValueError, "rank 2 failed with exit code 1; its own lines above say why"),
        (-signal.SIGTERM, SystemExit, "143"),
        (143, SystemExit, "143"),
        (-signal.SIGINT, SystemExit, "130"),
    ],
)
def test_the_exit_code_of_a_rank_is_handed_on(code: int, kind: type[BaseException], told: str) -> None:
    """A ChildProcessError is an OSError, which ends a stage with 75, and a ValueError one that ends it with 1."""
    fault = fault_of(2, code)
    assert type(fault) is kind
    assert told in str(fault)


def test_a_lost_rank_is_to_blame_for_what_it_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that could not be written because a rank was lost says so, and not that the disk is full."""
    monkeypatch.setattr("flows.ranks.GRACE_S", 1e5)  # this process is not to be ended by force
    with Watch.set() as watch:
        watch.processes.append(subprocess.Popen([sys.executable, "-c", "import os; os.abort()"]))
        looking = threading.Thread(target=watch.look)

        def save() -> None:
            looking.start()
            raise OSError("could not be written") from RuntimeError("Connection closed by peer")

        with pytest.raises(ChildProcessError, match="rank 1 was lost, by signal 6"), watch.blamed():
            save()
        with pytest.raises(OSError, match="No space left on device"), watch.blamed():
            raise OSError("No space left on device")


def test_a_lost_rank_is_to_blame_though_its_fault_was_raised_where_faults_are_suppressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while a training that a fault ends writes its last costs."""
    monkeypatch.setattr("flows.ranks.GRACE_S", 1e5)
    with Watch.set() as watch:

        def compute() -> None:
            try:
                raise RuntimeError("Connection reset by peer")
            finally:
                with suppress(OSError):
                    watch.lost_sight_of(1)
                    threading.Event().wait(TIMEOUT_S)

        with pytest.raises(ChildProcessError, match="rank 1 gives no sign of life any more"), watch.blamed():
            compute()


GRAPH = """
stages:
  warm_start:
    cmd: python -m flows warm_start
    deps: [agent_r1/tables.py, data/index]
  train:
    foreach: ${repro_runs}
    do:
      cmd: python -m flows train --run ${item}
      deps: [agent_r1/policy, agent_r1/tables.py, flows/train.py, data/index]
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dvc.yaml").write_text(GRAPH)
    listed = ("agent_r1/policy/deep/learner.py", "agent_r1/policy/chat.jinja", "agent_r1/tables.py", "flows/train.py")
    others = ("agent_r1/policy/__pycache__/learner.pyc", "agent_r1/training/watch.py", "data/index/a")
    for name in (*listed, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr("flows.ranks.CODE", tmp_path)
    return tmp_path


def test_a_stages_code_is_every_file_that_dvc_yaml_lists(root: Path) -> None:
    expected = {"agent_r1/policy/chat.jinja", "agent_r1/policy/deep/learner.py", "agent_r1/tables.py", "flows/train.py"}
    assert code_of("train") == {name: sha256(root / name) for name in expected}
    assert {*code_of("warm_start")} == {"agent_r1/tables.py"}


def test_a_stages_code_needs_the_graph(root: Path) -> None:
    (root / "dvc.yaml").unlink()
    with pytest.raises(FileNotFoundError, match=r"dvc\.yaml does not exist; install the project from its clone"):
        code_of("train")


def test_trainings_code_is_its_flow_and_not_the_viewer() -> None:
    found = code_of("train")
    assert {"flows/train.py", "agent_r1/training/watch.py", "agent_r1/learn/learner.py"} <= found.keys()
    others = ("agent_r1/inspection", "agent_r1/tracking", "agent_r1/params", "data")
    assert not [name for name in found if name.startswith(others)]


FOUR_GPUS = "import torch; torch.cuda.device_count = lambda: 4"
OF_A_MACHINE = (
    FOUR_GPUS
    + """
import os, sys
from contextlib import ExitStack
from agent_r1.devices.meeting import Place, meet, own_gpu
from flows.stage import accelerator

place = Place.given()
with ExitStack() as ends:
    if place.local_rank == 0:
        ends.enter_context(accelerator(1, 2))
    store = meet(place)  # which the leader's process has
    print(own_gpu(store, place), os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    sys.stdin.read()
"""
)


def of_launcher(rank: int, port: int, **others: str) -> dict[str, str]:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return {**place, "MASTER_PORT": str(port), KEY: "k" * 32, **others}


def test_two_trainings_of_a_launcher_share_no_gpu(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Of four that are told of, on a machine where each rank sees all."""
    running, seen = [], []
    for port in (free_port(), free_port()):
        for rank in range(2):
            environment = {**os.environ, **of_launcher(rank, port, AGENT_R1_LOCKS=str(tmp_path / "locks"))}
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            command = [sys.executable, "-c", OF_A_MACHINE]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            running.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        for process in running:
            assert process.stdout
            number, named = process.stdout.readline().split()
            seen.append(named.split(",")[int(number)])
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert sorted(seen) == ["0", "1", "2", "3"]


def test_the_first_rank_of_another_machine_holds_its_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that another stage leaves; the ranks meet afterwards, here in vain."""
    for name, value in of_launcher(1, 1, LOCAL_RANK="0", AGENT_R1_LOCKS=str(tmp_path / "locks")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("flows.ranks.signal.signal", lambda *_: None)
    monkeypatch.setattr("flows.ranks.HarmlessFormatter", SimpleNamespace())

    def met(*_: object) -> None:
        raise OSError(os.environ["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr("flows.ranks.watched", met)
    learner = LearnerParams(processes=1, nodes=2, silence_s=60.0, optimizer_offload=False)
    with accelerator(1, 1):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
        with pytest.raises(OSError, match=r"^5$"), following(learner, dict):
            pass


def test_a_launcher_may_show_each_rank_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `srun --gpus-per-task=1` does: rank 1 of a machine takes device 0, and not the second one."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    learner = LearnerParams(processes=2, nodes=1, silence_s=60.0, optimizer_offload=False)
    with pytest.raises(ValueError, match=r"learner.processes is 2, and there are 1 GPUs here"):
        given_place(learner)
    for name, value in of_launcher(1, 1).items():
        monkeypatch.setenv(name, value)
    place = given_place(learner)
    assert place
    assert own_gpu(HashStore(), place) == 0
    require_apart(["GPU-1", "GPU-2", "GPU-3"])
    with pytest.raises(ValueError, match=r"ranks 1 and 2 compute on the same GPU, GPU-2; have a launcher"):
        require_apart(["GPU-1", "GPU-2", "GPU-2"])
