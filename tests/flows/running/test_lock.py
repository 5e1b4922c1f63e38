"""Stages that want the accelerator queue up where its places are taken."""

import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from agent_r1.params.places import RunId
from agent_r1.params.sections import override
from flows.evaluate import EvaluationRequest, evaluate
from flows.processes import own_folder
from flows.stage import accelerator
from flows.train import train
from flows.warm_start import warm_start
from tests.cases import cases
from tests.fixtures import Inside, WriteParams

HOLD = """
import logging, os, time
from flows.stage import accelerator

logging.basicConfig(level=logging.INFO)
{before}
with accelerator({wanted}):
    print("held", os.environ.get("CUDA_VISIBLE_DEVICES", ""), flush=True)
    time.sleep({seconds})
"""
TWO_GPUS = "import torch; torch.cuda.device_count = lambda: 2"


def hold(start: Any, wanted: str = "1", seconds: int = 600, before: str = "") -> Any:
    return start("-c", HOLD.format(wanted=wanted, seconds=seconds, before=before))


@pytest.mark.slow  # a process that imports all
def test_imports_of_optimizers_leave_temporary_folder_empty(tmp_path: Path) -> None:
    """Others could make torch's folder there first: its name is known, and torch takes code from it."""
    code = "from flows.stage import accelerator\nwith accelerator(1):\n    import torch._dynamo.package"
    places = {"TMPDIR": tmp_path / "temporary", "AGENT_R1_LOCKS": tmp_path / "locks"}
    places["TMPDIR"].mkdir()
    environment = {**os.environ, **{name: str(path) for name, path in places.items()}}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list(places["TMPDIR"].iterdir()) == []


def test_second_process_waits_until_first_has_ended(start: Any) -> None:
    first = hold(start)
    assert first.stdout.readline() == "held \n"
    second = hold(start, seconds=0)
    assert f"waiting for the accelerator, held by process {first.pid}" in second.stderr.readline()
    assert second.poll() is None
    first.kill()  # even a kill frees it
    output, errors = second.communicate()
    assert output == "held \n"
    assert "waiting" not in errors  # said once
    assert second.returncode == 0
    assert hold(start, seconds=0).communicate() == ("held \n", "")  # a free one is taken without a word


def test_free_place_on_cpu_goes_to_first_process_that_looks(start: Any) -> None:
    first, second = (hold(start, "2") for _ in range(2))
    assert [each.stdout.readline() for each in (first, second)] == ["held \n"] * 2
    third = hold(start, "2", seconds=0)
    waiting = third.stderr.readline()
    assert all(str(each.pid) in waiting for each in (first, second))
    second.kill()
    assert third.communicate()[0] == "held \n"
    assert first.poll() is None


def test_process_for_two_gpus_is_not_passed_by_one_for_one(start: Any) -> None:
    first = hold(start, "1, 1", before=TWO_GPUS)
    assert first.stdout.readline() == "held 0\n"
    second = hold(start, "1, 2", before=TWO_GPUS)
    assert f"held by process {first.pid}" in second.stderr.readline()
    third = hold(start, "1, 1", before=TWO_GPUS)
    assert "waiting" in third.stderr.readline()  # though a GPU would be free
    first.kill()
    assert second.stdout.readline() == "held 0,1\n"
    assert third.poll() is None
    second.kill()
    assert third.stdout.readline() == "held 0\n"


@cases("named, count, wanted, seen")
def test_stage_holds_its_gpus_and_sees_no_others(
    named: str, count: int, wanted: int, seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_R1_LOCKS", str(tmp_path))
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with ExitStack() as stages:
        for expected in seen:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)  # as another process sees it
            stages.enter_context(accelerator(1, wanted))
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


STAGES: dict[str, Callable[[], None]] = {
    "train": lambda: train(RunId("ppo")),
    "evaluate": lambda: evaluate(EvaluationRequest(RunId("ppo"))),
    "warm_start": warm_start,
}


@cases("stage, section, message")
def test_own_code_is_looked_for_before_any_wait(
    stage: str, section: dict[str, Any], message: str, without_accelerator: Path
) -> None:
    settings = yaml.safe_load(without_accelerator.read_text())
    without_accelerator.write_text(yaml.safe_dump(override(settings, section)))
    with pytest.raises(ValueError, match=message):
        STAGES[stage]()


@pytest.fixture
def without_accelerator(
    small_project: Path, tmp_path: Path, write_params: WriteParams, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The small project, where whoever waits for the accelerator fails."""

    def waited_for(*_: Any) -> None:
        raise AssertionError("the accelerator is waited for")

    for name in ("data", "outputs", ".tracking"):
        (tmp_path / name).symlink_to(small_project / name)
    write_params(tmp_path, {})
    for module in ("train", "evaluate", "warm_start"):
        monkeypatch.setattr(f"flows.{module}.accelerator", waited_for)
    with inside(tmp_path):
        yield tmp_path / "params.yaml"


def test_locks_folder_is_the_same_from_terminal_and_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir=str(tmp_path)))
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, f"/another/{name}")
        assert own_folder() == tmp_path / ".cache/agent_r1"
    assert own_folder().stat().st_mode & 0o777 == 0o700


def link(folder: Path) -> None:
    (folder.parent / "of_another").mkdir()
    folder.symlink_to(folder.parent / "of_another")


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


@pytest.mark.parametrize("put", [link, Path.touch, open_to_all])
def test_locks_open_to_others(put: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "locks")
    monkeypatch.setenv("AGENT_R1_LOCKS", str(tmp_path / "locks"))
    with pytest.raises(ValueError, match=r"is no folder that you alone may write to; `chmod 700` it"), accelerator(1):
        pass
    assert not list(tmp_path.rglob("*.lock"))
