"""The output of commands: live lines on a terminal, log lines and tables, without control characters from outside."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich import progress as live
from rich.console import Console, RenderableType
from rich.logging import RichHandler
from rich.table import Column

from agent_r1.harmless import harmless, harmless_lines, without_password

TERMINAL = Console(stderr=True)  # one, so that log lines go above live ones
UNLIMITED = 2**16  # columns, where nothing says how many there are


def show(*parts: RenderableType) -> None:
    """Prints tables, as wide as the terminal or COLUMNS says, or else as they are, and text without a break."""
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNLIMITED)
    with console.capture() as printed:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str), markup=False, highlight=False)
    for line in printed.get().splitlines():
        sys.stdout.write(f"{line.rstrip()}\n")


def live_lines(*columns: live.ProgressColumn, expand: bool = False) -> live.Progress:
    """Lines at the end of the terminal that change while work lasts, and then go; elsewhere nothing is shown."""
    return live.Progress(*columns, console=TERMINAL, transient=True, expand=expand, disable=not TERMINAL.is_terminal)


@contextmanager
def counted(label: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
    """Counts in a live line. Gives a function that adds one, or goes to a count, and names its work.

    The total may change with it.
    """
    text = live.TextColumn("{task.description}")
    counts = live.MofNCompleteColumn()
    with live_lines(live.SpinnerColumn(), text, live.BarColumn(), counts, live.TimeElapsedColumn()) as progress:
        line = progress.add_task(label, completed=done, total=total)

        def count(work: str = "", done: int | None = None, total: int | None = None) -> None:
            text = f"{label}: {work}" if work else label
            progress.update(line, description=text, completed=done, total=total, advance=1 if done is None else None)

        yield count


class SideBySide:
    """Stages that run side by side, each with a live line while this context lasts; its end is the end of all.

    If they are `total` stages of a graph, a further line above says how many are done.
    """

    def __init__(self, total: int = 0) -> None:
        self.over = threading.Event()  # set once nothing is waited for any more
        self._done = 0
        self._total = total
        self._start = time.monotonic()
        text = live.TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
        self._lines = live_lines(live.SpinnerColumn(), text, live.TimeElapsedColumn(), expand=True)
        self._of_all = self._lines.add_task(f"0 of {total} stages done", visible=bool(total))

    def __enter__(self) -> Self:
        self._lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._lines.stop()

    def count(self) -> str:
        """Counts one more stage as done; gives the count, and the time of all, in words."""
        self._done += 1
        self._lines.update(self._of_all, description=f"{self._done} of {self._total} stages done")
        return f"{self._done} of {self._total}, {timedelta(seconds=int(time.monotonic() - self._start))} in all"

    @contextmanager
    def line(self, stage: str) -> Iterator[Callable[[str], None]]:
        """A live line of a stage: its latest log line, and how long it has run."""
        line = self._lines.add_task(stage)
        try:
            yield lambda text: self._lines.update(line, description=harmless(text))
        finally:
            self._lines.remove_task(line)


class HarmlessFormatter(logging.Formatter):
    """Removes control characters that servers, data and policies could send to the terminal."""

    label = ""  # the name of this process's stage, which begins every line

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = f"{self.label}{record.message}"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return harmless_lines(without_password(super().format(record)))


def show_traceback(_: type[BaseException], fault: BaseException, __: TracebackType | None) -> None:
    sys.stderr.write(harmless_lines(without_password("".join(traceback.format_exception(fault)))) + "\n")


def configure_logging() -> None:
    """INFO from the project, WARNING from the libraries; rich on a terminal, plain lines elsewhere."""
    rich = RichHandler(console=TERMINAL, show_path=False) if TERMINAL.is_terminal else None
    handler: logging.Handler = rich or logging.StreamHandler()
    pattern = "%(message)s" if rich else "%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(HarmlessFormatter(pattern, datefmt="%H:%M:%S"))
    # Prefect's account of its runs, tracebacks included, is for its own pages; the terminal shows ours.
    handler.addFilter(lambda record: not record.name.startswith(("prefect.flow_runs", "prefect.task_runs")))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    speak()


def speak() -> None:
    """Sets the project's own loggers to INFO; on a worker their lines go to the page of the run."""
    for name in ("agent_r1", "flows"):
        logging.getLogger(name).setLevel(logging.INFO)
