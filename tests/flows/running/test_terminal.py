"""Live lines of a terminal: counts, and stages beside each other with their common end."""

import io
import os
import sys
import time

import pytest
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from flows import terminal as shown_on
from flows.processes import ended_after, process_group
from flows.terminal import SideBySide


@pytest.mark.parametrize("is_terminal", [True, False])
def test_count_of_episodes_is_a_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    written = io.StringIO()
    monkeypatch.setattr(shown_on, "TERMINAL", Console(file=written, force_terminal=is_terminal, width=80))
    with shown_on.counted("evaluate ppo", 3) as over:
        over()
        over()
        assert ("evaluate ppo" in written.getvalue()) == is_terminal
    assert ("2/3" in written.getvalue()) == is_terminal


@pytest.mark.parametrize("is_over", [True, False], ids=["begins too late", "runs"])
def test_end_of_side_by_side_ends_command(is_over: bool) -> None:
    beside, sleep = SideBySide(), [sys.executable, "-c", "import time; time.sleep(600)"]
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
    time.sleep(0.3)  # longer than it takes to be drawn again
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


def test_every_stage_has_a_line_of_its_own_while_it_runs(terminal: Console) -> None:
    with SideBySide() as others, others.line("train@ppo") as say:
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


def test_line_above_stages_counts_those_that_are_done(terminal: Console) -> None:
    with SideBySide(17) as beside, beside.line("train@ppo"):
        assert shown(terminal).splitlines()[-2].split()[1:6] == ["0", "of", "17", "stages", "done"]
        assert beside.count() == "1 of 17, 0:00:00 in all"
        assert shown(terminal).splitlines()[-2].split()[1:6] == ["1", "of", "17", "stages", "done"]


LONG = " ".join(["sum"] * 100)


def test_pipe_cuts_no_line_of_its_width(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("agent", "all")
    table.add_row("ppo", LONG)
    shown_on.show(Markdown(LONG), table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == LONG, "no spaces up to the end of a page"
    assert sum(LONG in line for line in lines) == 2
    monkeypatch.setenv("COLUMNS", "60")
    shown_on.show(Markdown(LONG), table)
    assert max(map(len, capsys.readouterr().out.splitlines())) == 60
