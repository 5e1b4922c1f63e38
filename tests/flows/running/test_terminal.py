"""What lasts shows on a terminal how far it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flows import terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_how_many_episodes_are_over_is_a_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    written = io.StringIO()
    monkeypatch.setattr(terminal, "TERMINAL", Console(file=written, force_terminal=is_terminal, width=80))
    with terminal.counted("evaluate ppo", 3) as over:
        over()
        over()
    assert ("evaluate ppo" in written.getvalue() and "2/3" in written.getvalue()) == is_terminal
