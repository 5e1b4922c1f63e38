"""Trainings whose learner is shared by processes: as with one, and none is left when one is lost; a stage's code."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from torch import Tensor

from agent_r1.devices.meeting import Place
from agent_r1.params import Params, load
from agent_r1.params.places import RunId
from agent_r1.params.sections import override
from agent_r1.params.stages import LearnerParams
from agent_r1.records import Trajectory
from agent_r1.tables import read_rows
from flows.ranks import Loss, fault_of, given_place, shortfalls
from flows.stage import accelerator
from tests.answering import wait_for
from tests.cases import cases
from tests.fixtures import PARAMS, PLACES, FreePort, WriteParams

Start = Callable[..., subprocess.Popen[str]]

TRAIN = ("-m", "flows", "train", "--run", "ppo")
RUN = PLACES.training(RunId("ppo"))
WEIGHTS = "checkpoint/policy/model.safetensors"
WARM_START = "outputs/warm_start/model.safetensors"
TIMEOUT_S = 300.0
NETWORK = {True: {"GLOO_SOCKET_IFNAME": "r1"}, False: {"GLOO_SOCKET_IFNAME": "lo"}}


@pytest.fixture
def fresh(tmp_path: Path, small_project: Path, write_params: WriteParams) -> Path:
    """The project before training, with a learner that two processes share; `start` starts processes there."""
    write_params(tmp_path, {"learner": {"processes": 2, "silence_s": 15.0}})
    for part in ("data", "outputs/warm_start"):
        shutil.copytree(small_project / part, tmp_path / part)
    return tmp_path


def rank_of(training: subprocess.Popen[str], number: int, reached: Path) -> psutil.Process:
    wait_for(reached.exists, training, pause_s=0.002)
    [rank] = [
        process for process in psutil.Process(training.pid).children() if process.environ().get("RANK") == str(number)
    ]
    return rank


def sampled(run: Path) -> list[bytes]:
    files = sorted((run / "trajectories").glob("*.parquet"))
    return [row.token_ids.tobytes() for file in files for row in read_rows(file, Trajectory)]


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Between all weights: rounding may turn a step of Adam's where a gradient is nearly 0, and no more."""
    return math.sqrt(sum((left[name] - weight).square().sum().item() for name, weight in right.items()))


def test_two_ranks_train_as_one_does_though_one_is_killed(fresh: Path, ppo: Path, start: Start) -> None:
    """No other is left of it; then they go on to what one comes to that was left alone."""
    run = fresh / RUN
    training = start(*TRAIN)
    ranks = [rank_of(training, number, run / "trajectories/001.parquet") for number in range(2)]
    ranks[1].kill()
    errors = training.communicate(timeout=TIMEOUT_S)[1]
    assert training.returncode == 75, errors
    assert "rank 1 was lost, by signal 9; start again, and it goes on from its checkpoint" in errors
    assert not psutil.wait_procs(ranks, TIMEOUT_S)[1]
    training = start(*TRAIN)
    errors = training.communicate(timeout=TIMEOUT_S)[1]
    assert training.returncode == 0, errors
    assert "2 ranks share the learner" in errors
    assert "going on after 1 finished iterations" in errors
    assert_as_one(run, ppo, fresh / WARM_START)


def assert_as_one(run: Path, alone: Path, warm_start: Path) -> None:
    """Ranks sampled the tokens of one that trained alone, and have its weights but for rounding."""
    assert sampled(run) == sampled(alone)
    untrained, shared, single = (load_file(path) for path in (warm_start, run / WEIGHTS, alone / WEIGHTS))
    assert distance(shared, single) < 0.01 * distance(untrained, single)


@pytest.fixture
def machines() -> Iterator[list[list[str]]]:
    """What begins a command on each of two machines, by network namespaces; nothing where there are none to be had."""
    names = [f"ranks-{os.getpid()}-{number}" for number in range(2)]
    links = [f"r{os.getpid() % 10**6}v{number}" for number in range(2)]
    commands = [f"ip link add {links[0]} type veth peer name {links[1]}"]
    for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
        inside = f"ip -n {name}"
        commands += [f"ip netns add {name}", f"ip link set {link} netns {name}", f"{inside} link set {link} name r1"]
        commands += [f"{inside} addr add 10.77.0.{number}/24 dev r1", f"{inside} link set r1 up"]
        commands += [f"{inside} link set lo up"]
    try:
        made = all(subprocess.run(command.split(), capture_output=True).returncode == 0 for command in commands)
    except FileNotFoundError:
        made = False
    yield [["ip", "netns", "exec", name] if made else [] for name in names]
    for name in names if made else ():
        subprocess.run(["ip", "netns", "del", name], check=True)


def test_ranks_of_two_machines_train_as_one_does(
    fresh: Path, ppo: Path, write_params: WriteParams, start: Start, machines: list[list[str]], free_port: FreePort
) -> None:
    """Started by torchrun's own recipe for two; without namespaces over loopback."""
    write_params(fresh, {"learner": {"processes": 1, "nodes": 2, "silence_s": 15.0}})
    apart = all(machines)
    endpoint = f"{'10.77.0.1' if apart else '127.0.0.1'}:{free_port()}"

    nodes = []
    for number, prefix in enumerate(machines, 1):
        own = f"10.77.0.{number}" if apart else "127.0.0.1"
        recipe = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
        recipe += ["--rdzv-conf", f"is_host={int(number == 1)}"]  # namespaces have one host name
        recipe += ["--rdzv-endpoint", endpoint, "--local-addr", own, "-m", "flows", "--", *TRAIN[2:]]
        torchrun = [*prefix, sys.executable, "-m", "torch.distributed.run", *recipe]
        nodes.append(start("-c", f"import os; os.execvp({torchrun[0]!r}, {torchrun!r})", **NETWORK[apart]))
    errors = [node.communicate(timeout=TIMEOUT_S)[1] for node in nodes]
    assert any("2 ranks share the learner" in text for text in errors), errors
    assert_as_one(fresh / RUN, ppo, fresh / WARM_START)


def test_place_that_the_parameters_do_not_ask_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def learner(processes: int, nodes: int = 1) -> LearnerParams:
        return load(PARAMS).learner.model_copy(update={"processes": processes, "nodes": nodes})

    assert given_place(learner(1)) is None
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(ValueError, match=f"learner.processes is {cores + 1}, and there are {cores} cores here"):
        given_place(learner(cores + 1))
    with pytest.raises(ValueError, match=r"learner.nodes is 2, .*torchrun --nnodes 2 --nproc-per-node 1 "):
        given_place(learner(1, nodes=2))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert given_place(learner(1, nodes=2)) == Place(rank=1, size=2, local_rank=0, file="")
    with pytest.raises(ValueError, match=r"rank 1 of 2, on its machine 0, and learner asks for 1 processes on 1"):
        given_place(learner(1))


@cases("gpus, learner, engine, lacking")
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


def test_task_of_slurms_that_is_bound_to_one_core_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
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


@cases("code, kind, told")
def test_exit_code_of_a_rank_is_handed_on(code: int, kind: str, told: str) -> None:
    """A ChildProcessError is an OSError, which ends a stage with 75."""
    fault = fault_of(2, code)
    assert type(fault).__name__ == kind
    assert told in str(fault)


@pytest.fixture
def loss() -> Iterator[Loss]:
    """Of a rank, which the leader hears of in another thread, as in trainings."""
    loss = Loss()
    hearing = threading.Thread(target=loss.notice, args=[RuntimeError("Connection closed by peer")])
    hearing.start()
    yield loss
    loss.over.set()
    hearing.join()


def test_lost_rank_is_to_blame_for_what_it_broke(loss: Loss) -> None:
    """A checkpoint that could not be written because a rank was lost says so, and not that the disk is full."""
    with pytest.raises(ChildProcessError, match=r"a rank was lost; .*: Connection closed by peer"), loss.blamed():
        raise OSError("could not be written") from RuntimeError("Connection closed by peer")
    with pytest.raises(OSError, match="No space left on device"), loss.blamed():
        raise OSError("No space left on device")


def test_leader_that_loses_a_rank_ends_by_it(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Though it talks to no rank meanwhile, and is where faults are suppressed."""
    monkeypatch.setattr("flows.ranks.GRACE_S", 0.5)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        loss = request.getfixturevalue("loss")
        with pytest.raises(ChildProcessError, match="a rank was lost"), loss.blamed(), suppress(OSError):
            threading.Event().wait(TIMEOUT_S)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_rank_has_what_the_process_that_started_it_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It waits for no accelerator, and takes none from others."""
    monkeypatch.setenv("AGENT_R1_LOCKS", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("agent_r1.gpus.driver_cuda", lambda: (99, 0))
    with accelerator(1, 1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
        monkeypatch.setenv("RANK", "1")
        with accelerator(1, 2):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
