"""The commands of a flow that run beside each other: a live line for each on a terminal, and one end for all."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from agent_r1.harmless import harmless
from flows.processes import GRACE_S, end_group, process_group
from flows.terminal import live_lines


class Beside:
    """Commands that run beside each other. As a context it shows them while it lasts, and ends them with it."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self.over = threading.Event()  # from then on nothing is waited for
        said = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
        self._lines = live_lines(SpinnerColumn(), said, TimeElapsedColumn(), expand=True)

    def __enter__(self) -> Self:
        self._lines.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        """Ends what runs, with all that it started; no other command begins."""
        self.over.set()
        for process in [*self._running]:
            end_group(process, GRACE_S)
        self._lines.stop()

    @contextmanager
    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
        """Runs a command as `process_group` does; one that begins after the others were ended is ended at once."""
        with process_group(command, environment) as process:
            self._running.add(process)
            try:
                if self.over.is_set():  # looked at after `__exit__` can find the command
                    end_group(process, GRACE_S)
                yield process
            finally:
                self._running.discard(process)

    @contextmanager
    def line(self, stage: str) -> Iterator[Callable[[str], None]]:
        """A live line of a stage: what it said last, which begins with its label, and how long it has run."""
        shown = self._lines.add_task(stage)
        try:
            yield lambda said: self._lines.update(shown, description=harmless(said))
        finally:
            self._lines.remove_task(shown)
