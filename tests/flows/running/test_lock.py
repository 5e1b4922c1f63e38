"""Two stages that want the accelerator queue up."""

from __future__ import annotations

from typing import Any

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
