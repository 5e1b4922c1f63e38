"""Stages that want the accelerator queue up where its places are taken."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.stage import accelerator, own_folder

HOLD = """
import logging, sys
from flows.stage import accelerator

logging.basicConfig(level=logging.INFO)
with accelerator(1):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_process_waits_until_the_first_is_gone(start: Any) -> None:
    first = start("-c", "import time" + HOLD.replace("sys.stdin.read()", "time.sleep(600)"))
    assert first.stdout.readline() == "held\n"
    second = start("-c", HOLD.replace("sys.stdin.read()", "pass"))
    assert f"waiting for the accelerator, held by process {first.pid}" in second.stderr.readline()
    assert second.poll() is None
    first.kill()  # even a kill frees it
    output, errors = second.communicate()
    assert output == "held\n"
    assert "waiting" not in errors  # said once
    assert second.returncode == 0


def test_a_place_on_the_cpu_is_taken_by_whoever_finds_it_free(start: Any) -> None:
    hold, end = HOLD.replace("accelerator(1)", "accelerator(2)"), "sys.stdin.read()"
    first, second = (start("-c", "import time" + hold.replace(end, "time.sleep(600)")) for _ in range(2))
    assert [each.stdout.readline() for each in (first, second)] == ["held\n"] * 2
    third = start("-c", hold.replace(end, "pass"))
    waiting = third.stderr.readline()
    assert all(str(each.pid) in waiting for each in (first, second))
    second.kill()
    assert third.communicate()[0] == "held\n"
    assert first.poll() is None


def test_a_gpu_is_held_by_one_stage_which_sees_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with accelerator(1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")  # as another process sees it
        with accelerator(1):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


def test_a_free_accelerator_is_taken_without_a_word(start: Any) -> None:
    for _ in range(2):
        output, errors = start("-c", HOLD.replace("sys.stdin.read()", "pass")).communicate()
        assert (output, errors) == ("held\n", "")


def test_the_locks_folder_is_the_same_from_a_terminal_cron_or_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir=str(tmp_path)))
    monkeypatch.delenv("AGENT_R1_LOCKS", raising=False)
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
def test_what_another_user_could_have_put_there_is_refused_and_not_written_to(
    put: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "locks")
    monkeypatch.setenv("AGENT_R1_LOCKS", str(tmp_path / "locks"))
    with (
        pytest.raises(ValueError, match=r"locks is no folder that you alone may write to; `chmod 700` it"),
        accelerator(1),
    ):
        pass
    assert not list(tmp_path.rglob("*.lock"))
