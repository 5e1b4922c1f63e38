"""Trainings whose learner is shared by processes: as with one, and none is left when one is lost; a stage's code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from agent_r1.devices.meeting import KEY
from agent_r1.files import sha256
from agent_r1.params.places import RunId
from agent_r1.params.stages import LearnerParams
from agent_r1.records import Trajectory
from agent_r1.tables import read_rows
from flows.ranks import Watch, code_of, fault_of, given_place
from tests.fixtures import PLACES, WriteParams

Start = Callable[..., subprocess.Popen[str]]

TRAIN = ("-m", "flows", "train", "--run", "ppo")
RUN = PLACES.training(RunId("ppo"))
WEIGHTS = "checkpoint/policy/model.safetensors"
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
    ours, theirs = load_file(run / WEIGHTS), load_file(ppo / WEIGHTS)
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 2e-5  # of 3e-4 per step


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
