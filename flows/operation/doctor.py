"""Is this machine fit for the pipeline, and what to do where it is not: `python -m flows doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.operation.checks import Finding, Status, found_by
from flows.processes import process_group
from flows.stage import clean_end

# Each row is examined in a process of its own, all at the same time: a library that crashes while it is imported, or
# hangs, is a finding like any other.
EXAMINATIONS = {
    "project": ("flows.operation.checks", ["versions", "parameters", "tracking_folder"]),
    "dvc": ("flows.operation.checks", ["dvc_project", "dvc_remote"]),
    "machine": ("flows.operation.checks", ["disk", "memory_of_runs", "accelerator"]),
    "engine": ("flows.operation.checks", ["engine"]),
    "services": ("flows.operation.checks", ["prefect_port", "mlflow_port", "prefect"]),
    "tracking": ("flows.operation.checks", ["mlflow", "mlflow_store"]),
}
TIME_LIMIT_S = 150.0
COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "red"}

logger = logging.getLogger(__name__)


def examine(names: Sequence[str] = tuple(EXAMINATIONS)) -> list[Finding]:
    """Makes the examinations of these names, all at once, and returns what they found, in their order."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        running = [(name, _start(name, Path(scratch), stack)) for name in names]
        deadline = time.monotonic() + TIME_LIMIT_S
        return [each for name, process in running for each in _findings(name, process, Path(scratch), deadline)]


def _start(name: str, scratch: Path, stack: ExitStack) -> subprocess.Popen[str]:
    log = stack.enter_context((scratch / f"{name}.log").open("w"))
    command = [sys.executable, "-m", "flows", "doctor", "--examine", name, "--to", str(scratch / f"{name}.json")]
    return stack.enter_context(process_group(command, os.environ, output=log))


def _findings(name: str, process: subprocess.Popen[str], scratch: Path, deadline: float) -> list[Finding]:
    """What an examination wrote, or how it ended without."""
    report = scratch / f"{name}.json"
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return [_unfinished(name, f"no answer within {TIME_LIMIT_S:.0f} s")]
    if report.exists():
        return [Finding(**{**each, "status": Status(each["status"])}) for each in json.loads(report.read_text())]
    said = (scratch / f"{name}.log").read_text().strip().splitlines()
    return [_unfinished(name, f"its process ended with {code}: {said[-1] if said else 'no word'}")]


def _unfinished(name: str, message: str) -> Finding:
    remedy = f"python -m flows doctor --examine {name} shows all it says"
    return Finding(check=name, status=Status.FAILED, message=message, remedy=remedy)


def made_here(name: str) -> list[Finding]:
    """Makes one examination in this process."""
    module, checks = EXAMINATIONS[name]
    content = vars(import_module(module))
    return [found_by(content[check]) for check in checks]


def table(findings: Sequence[Finding]) -> Table:
    """A row for each finding, and what to do below it."""
    shown = Table(box=None, padding=(0, 1))
    for column in ("", "check", "finding"):
        shown.add_column(column, no_wrap=column != "finding", overflow="fold")
    for each in findings:
        shown.add_row(Text(each.status, style=COLOURS[each.status]), each.check, Text(each.message))
        if each.remedy:
            shown.add_row("", "", Text(f"-> {each.remedy}", style="bold"))
    return shown


def main() -> None:
    """The command line: prints a table; exit code 1 where anything failed."""
    parser = argparse.ArgumentParser(description="Checks the machine and says what to do about each finding.")
    parser.add_argument("--examine", choices=EXAMINATIONS, help="this alone, in this process")
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with clean_end():
        console = Console()
        with console.status("examining, half a minute"):
            findings = made_here(arguments.examine) if arguments.examine else examine()
        if arguments.to:
            arguments.to.write_text(json.dumps([dataclasses.asdict(each) for each in findings]))
            return
        console.print(table(findings))
        if any(each.status is Status.FAILED for each in findings):
            sys.exit(1)


if __name__ == "__main__":
    main()
