"""A process group leaves nothing behind, however its block ends."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from flows import processes
from flows.processes import process_group

# The leader starts a child that will not end by itself; the child says its process id.
FAMILY = """
import subprocess, sys, time
child = "import os, signal, time; {stubborn}; print(os.getpid(), flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep({leader_s})
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def is_running(pid: int) -> bool:
    """A zombie has ended and only waits to be counted."""
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return status.strip() != "" and not status.startswith("Z")


def family(stubborn: str, leader_s: int) -> list[str]:
    return [sys.executable, "-c", FAMILY.format(stubborn=stubborn, leader_s=leader_s)]


@pytest.mark.parametrize("leader_s", [0, 600], ids=["leader gone", "leader there"])
@pytest.mark.parametrize("stubborn", ["pass", STUBBORN], ids=["willing", "stubborn"])
def test_an_exception_ends_the_whole_group(monkeypatch: pytest.MonkeyPatch, stubborn: str, leader_s: int) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    with suppress(KeyboardInterrupt), process_group(family(stubborn, leader_s), os.environ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert is_running(child)
        raise KeyboardInterrupt
    assert not is_running(child)
    assert process.returncode is not None


ORPHAN = """
import os, signal, sys, time
from flows.processes import end_with_parent

if os.fork():
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
end_with_parent()
signal.signal(signal.SIGTERM, lambda *_: (print("ended", flush=True), sys.exit()))
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_the_one_that_started_it(start: Any) -> None:
    parent = start("-c", ORPHAN, stdin=subprocess.PIPE)
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "ended\n"


def test_output_and_errors_are_one_stream() -> None:
    code = "import sys; print('out', flush=True); print('error', file=sys.stderr); sys.exit(3)"
    with process_group([sys.executable, "-c", code], os.environ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "out\nerror\n"
        assert process.wait() == 3
