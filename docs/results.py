"""Puts stored results into the documents: `python -m docs.results`, with `NAME REPORT` first a report into docs/NAME.

A block of README.md or of a page of docs/ begins with the source of its table: a page and one of its headings, and how
many rows if not all; or a file of docs/measured, and the `column = value` of its rows if not all. Either names the
columns that the table is without. Below one of docs/measured stands when and on which machine it was measured. A test
holds the blocks to them.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.stored import stored
from benchmarks.stored import table as as_table

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?P<mark><!-- (?P<page>docs/[\w/]+\.\w+)(?:: (?P<heading>[^;\n]+))?(?:; (?P<rows>\d+) rows)?"
    r"(?:; without (?P<without>[^;\n]+))? -->\n)\n*"
    r"(?:\|.*\n)*(?:\n+From \[\w+\.csv\].*\n)?\n*"
)


def filled(text: str, folder: Path) -> str:
    """A page of a folder whose blocks hold the tables of the files that they name."""

    def block(found: re.Match[str]) -> str:
        file = ROOT / found["page"]
        without = found["without"].split(" / ") if found["without"] else []
        most = int(found["rows"]) if found["rows"] else None
        if file.suffix == ".csv":
            made = measured(file, folder, found["heading"], without, most)
        else:
            made = narrower(table(file.read_text(), found["heading"]), without)
            made = "".join(made.splitlines(keepends=True)[: most and 2 + most])
        return f"{found['mark']}\n{made}\n"

    return BLOCK.sub(block, text).rstrip("\n") + "\n"


def table(page: str, heading: str) -> str:
    """The first table below a heading of a page. Raises ValueError if there is none."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(?:(?!#|\|).*\n)*(?P<table>(?:\|.*\n)+)", page, re.MULTILINE)
    if not found:
        raise ValueError(f"the page has no table below the heading {heading!r}")
    return found["table"]


def narrower(table: str, without: Sequence[str]) -> str:
    """A table without some of its columns. Raises ValueError if it has no column of a name."""
    lines = [line.strip("|\n").split("|") for line in table.splitlines()]
    names = [name.strip() for name in lines[0]]
    dropped = {names.index(name) for name in without}
    cells = [[cell for index, cell in enumerate(line) if index not in dropped] for line in lines]
    return "".join(f"|{'|'.join(line)}|\n" for line in cells)


def measured(
    file: Path, folder: Path, choice: str | None = None, without: Sequence[str] = (), most: int | None = None
) -> str:
    """The rows of a file of docs/measured as a table for a page of a folder, and below it where they are from.

    A choice, `column = value`, leaves out the other rows, and this column. Raises ValueError if no row has the value,
    and if there is no column to be without.
    """
    rows = whole = stored(file)
    link = f"From [{file.name}]({file.relative_to(folder)})"
    if choice:
        column, _, value = choice.partition(" = ")
        chosen = [{name: row[name] for name in row if name != column} for row in rows if row.get(column) == value]
        if not chosen:
            raise ValueError(f"{file} has no row whose {column!r} is {value!r}; choose another one")
        rows = chosen
    rows = rows[:most]
    link += f", {len(rows)} of its {len(whole)} rows" if len(rows) < len(whole) else ""
    origins = dict.fromkeys(", ".join(filter(None, (row["machine"], row["date"]))) for row in rows)
    return f"{narrower(as_table(rows), without)}\n{link}: {'; '.join(origins)}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts stored results into README.md and the pages of docs/.")
    parser.add_argument("name", nargs="?", help="of the folder in docs/ that the report replaces")
    parser.add_argument("report", nargs="?", type=Path, help="the folder of the report")
    given = parser.parse_args()
    if given.name and not given.report:
        parser.error("name the folder of the report too")
    if given.report:
        kept = ROOT / "docs" / given.name
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(given.report, kept)
        shutil.copytree(given.report.with_name("scores"), kept / "scores")
        if given.name == "report":
            shutil.copy("dvc.lock", kept)
    for page in PAGES:
        page.write_text(filled(page.read_text(), page.parent))


if __name__ == "__main__":
    main()
