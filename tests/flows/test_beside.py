"""Stages beside each other: their end, and their live lines."""

from __future__ import annotations

import io
import os
import sys
import time

import pytest
from rich.console import Console

from flows.pipeline import Beside
from flows.processes import ended_after, process_group


@pytest.mark.parametrize("is_over", [True, False], ids=["begins too late", "runs"])
def test_the_end_of_all_ends_a_command(is_over: bool) -> None:
    beside, sleep = Beside(), [sys.executable, "-c", "import time; time.sleep(600)"]
    if is_over:
        beside.over.set()
    with process_group(sleep, os.environ) as process, ended_after(process, 600.0, beside.over) as late:
        with beside:
            pass
        assert process.wait(30) < 0
        assert not late.is_set()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    monkeypatch.setattr("flows.terminal.TERMINAL", console)
    return console


def shown(terminal: Console) -> str:
    """All that the terminal was given until now."""
    time.sleep(0.3)  # longer than it takes to be drawn again
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


def test_every_stage_has_a_line_of_its_own_while_it_runs(terminal: Console) -> None:
    with Beside() as others, others.line("train@ppo") as say:
        with others.line("evaluate@grpo") as say_too:
            assert "train@ppo" in shown(terminal).splitlines()[-2]
            say("train ppo: iteration 7 of 20, [about] 9 min left")
            say_too("evaluate grpo: " + "x" * 60 + "\x1b[2J")
            both = shown(terminal).splitlines()[-2:]
            assert "train ppo: iteration 7 of 20, [about]" in both[0]
            assert "evaluate grpo: xxx" in both[1]
            assert "\x1b[2J" not in both[1]
            assert "0:00:0" in both[0], "how long it runs"
        assert "evaluate grpo" not in shown(terminal).splitlines()[-1]


def test_elsewhere_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Console(file=io.StringIO())
    monkeypatch.setattr("flows.terminal.TERMINAL", file)
    with Beside() as others, others.line("train@ppo") as say:
        say("iteration 7 of 20")
        assert shown(file) == ""
