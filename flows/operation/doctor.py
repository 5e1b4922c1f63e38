"""Is this machine fit for the pipeline, and what to do where it is not: `agent-r1 doctor`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_r1 import params
from agent_r1.harmless import harmless_lines
from flows.operation.checks import (
    FAILED,
    Finding,
    Status,
    aside,
    dvc,
    parameters,
    ports,
    prefect,
    registered,
    store,
    versions,
)
from flows.operation.machine import engine, ranks, room, try_engine

COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "red"}


def found_by(check: Callable[[], Finding]) -> Finding:
    """The finding of a check; one that raises has found something too, `what is wrong; what to do` in its message."""
    try:
        return check()
    except Exception as fault:  # whatever is wrong with a machine is what the doctor is asked for
        wrong, _, remedy = str(fault).partition("; ")
        kind = "" if isinstance(fault, ValueError | OSError) else f"{type(fault).__name__}: "
        return Finding(FAILED, f"{kind}{wrong}", remedy or "mend what the message names")


_IN_ORDER = (versions, parameters, room, ranks, engine, ports, prefect, store, dvc, registered, aside)
CHECKS = MappingProxyType({check.__name__: check for check in _IN_ORDER})


def table(findings: Mapping[str, Finding]) -> Table:
    """A row for each finding, and what to do below it."""
    shown = Table(box=None, padding=(0, 1))
    for column in ("", "check", "finding"):
        shown.add_column(column, no_wrap=column != "finding", overflow="fold")
    for check, found in findings.items():
        shown.add_row(Text(found.status, style=COLOURS[found.status]), check, Text(harmless_lines(found.message)))
        if found.remedy:
            shown.add_row("", "", Text(harmless_lines(f"-> {found.remedy}"), style="bold"))
    return shown


def doctor(checks: Sequence[str] = (), *, engine: bool = False) -> None:
    """Prints a table of all checks, or of some by name; exit code 1 where anything failed."""
    if engine:
        try_engine(params.load().engine)
        return
    if unknown := [name for name in checks if name not in CHECKS]:
        raise ValueError(f"there is no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    console = Console()
    with console.status("examining, about a minute"):
        findings = {name: found_by(check) for name, check in CHECKS.items() if name in (checks or CHECKS)}
    console.print(table(findings))
    if any(found.status is Status.FAILED for found in findings.values()):
        sys.exit(1)
