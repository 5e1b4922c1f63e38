"""What a benchmark measured, kept where the documents take it from: a file of rows, `docs/measured/NAME.csv`.

Every row says which command measured it, when, and on what.
"""

from __future__ import annotations

import argparse
import csv
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from agent_r1.surroundings import machine

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "measured"
ORIGIN = ("command", "date", "machine")  # the last columns of every file
NUMBER = re.compile(r"([-+]?[\d.,:]+(e-\d+)?( ([kMG]i?B|ms|s|min))?)?")

Row = Mapping[str, str]  # cells as they are shown, with their units


def options(description: str) -> argparse.ArgumentParser:
    """A parser with the option of benchmarks whose rows may be stored."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--store", action="store_true", help="in docs/measured")
    return parser


def show(name: str, rows: Sequence[Row], *, store: bool, keys: int = 1) -> None:
    """Prints rows as a table, and stores them where that is wanted."""
    print(table(rows))
    if store:
        keep(MEASURED / f"{name}.csv", rows, keys)


def table(rows: Sequence[Row]) -> str:
    """Rows without their origin, as Markdown; columns of numbers stand at the right."""
    columns = [name for name in rows[0] if name not in ORIGIN]
    cells = [[row[name] for name in columns] for row in rows]
    rule = ["---:" if all(map(NUMBER.fullmatch, column)) else "---" for column in zip(*cells, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, rule, *cells])


def keep(file: Path, rows: Sequence[Row], keys: int = 1) -> None:
    """Adds rows to a file, each in place of the one with the same first `keys` cells.

    Raises ValueError where the file has other columns.
    """
    origin = dict(zip(ORIGIN, (command(), datetime.now(UTC).date().isoformat(), machine()), strict=True))
    known = {_key(row, keys): row for row in (stored(file) if file.exists() else [])}
    for row in rows:
        known[_key(row, keys)] = {**row, **origin}
    [columns, *others] = {tuple(row) for row in known.values()}
    if others:
        raise ValueError(f"{file} has other columns than what was measured, {', '.join(rows[0])}; move it aside")
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(known.values())


def stored(file: Path) -> list[dict[str, str]]:
    """The rows of a file, with their origin."""
    with file.open(newline="") as rows:
        return list(csv.DictReader(rows))


def command() -> str:
    """What was typed to start this process; a folder of this machine is FOLDER."""
    return shlex.join(["python", *("FOLDER" if Path(word).is_absolute() else word for word in sys.orig_argv[1:])])


def _key(row: Row, keys: int) -> tuple[str, ...]:
    return tuple(row.values())[:keys]
