"""Two stages that want the accelerator queue up."""

from __future__ import annotations

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
with accelerator():
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
        accelerator(),
    ):
        pass
    assert not list(tmp_path.rglob("*.lock"))
