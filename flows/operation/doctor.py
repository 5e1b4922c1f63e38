"""Is this machine fit for the pipeline, and what to do where it is not: `python -m flows doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_r1 import params
from flows.operation.checks import CHECKS, Finding, Status, found_by, try_engine

COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "red"}


def table(findings: Mapping[str, Finding]) -> Table:
    """A row for each finding, and what to do below it."""
    shown = Table(box=None, padding=(0, 1))
    for column in ("", "check", "finding"):
        shown.add_column(column, no_wrap=column != "finding", overflow="fold")
    for check, found in findings.items():
        shown.add_row(Text(found.status, style=COLOURS[found.status]), check, Text(found.message))
        if found.remedy:
            shown.add_row("", "", Text(f"-> {found.remedy}", style="bold"))
    return shown


def main() -> None:
    """The command line: prints a table; exit code 1 where anything failed."""
    parser = argparse.ArgumentParser(description="Checks the machine and says what to do about each finding.")
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"all, or some of {', '.join(CHECKS)}")
    parser.add_argument("--engine", action="store_true", help="this one alone, with all that the engine says")
    given = parser.parse_args()
    if given.engine:
        try_engine(params.load().engine)
        return
    if unknown := [name for name in given.checks if name not in CHECKS]:
        raise ValueError(f"there is no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    console = Console()
    with console.status("examining, about a minute"):
        findings = {name: found_by(check) for name, check in CHECKS.items() if name in (given.checks or CHECKS)}
    console.print(table(findings))
    if any(found.status is Status.FAILED for found in findings.values()):
        sys.exit(1)
