"""The doctor's checks of the machine that trains: its room, its ranks, its engine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.operation.doctor import FAILED, OK, compare_room, engine, found_by, ranks, room

ROOT = Path(__file__).parents[3]
WriteParams = Callable[[Path, dict[str, Any]], None]


@pytest.fixture
def folder(tmp_path: Path, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a params.yaml, on a machine of four cores."""
    write_params(tmp_path, {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    return tmp_path


@pytest.mark.parametrize(
    ("disk", "checkpoints", "memory", "status", "message"),
    [
        (1.5, [], 16.0, OK, "disk: 1.5 GiB free, about 1.0 needed"),
        (0.5, [], 16.0, FAILED, "disk: 0.5 GiB free, about 1.0 needed"),
        (20.0, [4.0, 2.0], 16.0, OK, "disk: 20.0 GiB free, about 17.0 needed"),
        (20.0, [4.0, 2.0], 3.0, FAILED, "memory: 3.0 GiB free, about 3.5 needed by the largest run"),
    ],
)
def test_room_against_the_runs(disk: float, checkpoints: list[float], memory: float, status: str, message: str) -> None:
    """On disk: a reserve of 1 GiB, two checkpoints of every run, and a third of the largest: 1 + 2 * 6 + 4."""
    found = compare_room(disk, checkpoints, memory, 3.5)
    assert (found.status, found.message.startswith(message)) == (status, True)


def test_the_room_of_a_small_project(small_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_project)
    message = room().message
    assert "about 1.0 needed" in message
    assert "about 2." in message or "about 3." in message  # 2.5 of libraries, and of the sampler


@pytest.mark.parametrize(
    ("processes", "gpus", "told"),
    [
        (2, 0, "learner.processes is 2, and there are 4 cores here"),
        (5, 0, "learner.processes is 5, and there are 4 cores here; lower it"),
        (3, 2, "learner.processes is 3, and there are 2 GPUs here; lower it"),
    ],
)
def test_ranks_that_are_to_have_a_device_each(
    processes: int, gpus: int, told: str, folder: Path, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_params(folder, {"learner": {"processes": processes}})
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    found = found_by(ranks)
    assert "; ".join(filter(None, [found.message, found.remedy])) == told
    assert found.status == (FAILED if "lower" in told else OK)


def test_what_a_launcher_gives_is_compared_with_params(
    folder: Path, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> None:
    write_params(folder, {"learner": {"processes": 1, "nodes": 2}})
    found = found_by(ranks)
    assert found.message == "learner.nodes is 2, and this process was given no rank"
    assert "torchrun --nnodes 2" in found.remedy

    def given(**variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return found_by(ranks).message

    assert given(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0") == "RANK is set and MASTER_ADDR is not"
    assert "no machine is found by MASTER_ADDR '127..0'" in given(MASTER_ADDR="127..0", MASTER_PORT=str(free_port()))
    assert given(MASTER_ADDR="127.0.0.1").startswith("this is rank 0 of 2, which meet at 127.0.0.1:")
    assert "rank 1 of 2, on its machine 1, and learner asks for 1 processes on 2" in given(RANK="1", LOCAL_RANK="1")
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert given(RANK="0", LOCAL_RANK="0", MASTER_PORT=port).startswith(f"port {port}, where the ranks are to meet")
        assert found_by(ranks).remedy.startswith("set MASTER_PORT to another")
        assert given(RANK="1").startswith("this is rank 1")  # the leader's machine may be another
        assert given(RANK="0", TORCHELASTIC_USE_AGENT_STORE="True").startswith("this is rank 0")  # torchrun's own


def test_an_engine_samples(folder: Path, write_params: WriteParams) -> None:
    write_params(folder, {"engine": {"kind": "transformers"}})
    assert engine().message == "transformers loaded a tiny model and sampled from it"


def test_an_engine_that_does_not_start_or_hangs(
    folder: Path, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_params(folder, {"engine": {"kind": "transformers"}})
    (folder / "torch.py").write_text("raise ImportError('libtorch.so: cannot open')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    found = engine()
    assert found.message == "transformers: its process ended with 1: ImportError: libtorch.so: cannot open"
    assert "`-m flows doctor --engine` shows all" in found.remedy
    (folder / "torch.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr("flows.operation.doctor.ENGINE_TIMEOUT_S", 3.0)
    assert "no answer within 3 s" in engine().message


def test_servers_that_are_down(folder: Path, write_params: WriteParams, free_port: Callable[[], int]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    write_params(folder, {"engine": {"kind": "server", "server": {"urls": [url]}}})
    found = found_by(engine)
    assert found.status == FAILED
    assert f"the engine server {url} does not answer" in found.message
