"""Puts stored results into the documents: `python -m docs.results`, with `NAME REPORT` first a report into docs/NAME.

A block of README.md or of a page of docs/ begins with the source of its table: a page and one of its headings, and how
many rows if not all; or a file of docs/measured, and the `column = value` of its rows if not all. Below such a table
stands when and on which machine it was measured. A test holds the blocks to them.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from benchmarks.stored import stored
from benchmarks.stored import table as as_table

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?P<mark><!-- (?P<page>docs/[\w/]+\.\w+)(?:: (?P<heading>[^;\n]+)(?:; (?P<rows>\d+) rows)?)? -->\n)\n*"
    r"(?:\|.*\n)*(?:\n+From \[\w+\.csv\].*\n)?\n*"
)


def filled(text: str, folder: Path) -> str:
    """A page of a folder whose blocks hold the tables of the files that they name."""

    def block(found: re.Match[str]) -> str:
        file = ROOT / found["page"]
        if file.suffix == ".csv":
            made = measured(file, folder, found["heading"])
        else:
            made = table(file.read_text(), found["heading"])
        made = "".join(made.splitlines(keepends=True)[: 2 + int(found["rows"])]) if found["rows"] else made
        return f"{found['mark']}\n{made}\n"

    return BLOCK.sub(block, text).rstrip("\n") + "\n"


def table(page: str, heading: str) -> str:
    """The first table below a heading of a page. Raises ValueError if there is none."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(?:(?!#|\|).*\n)*(?P<table>(?:\|.*\n)+)", page, re.MULTILINE)
    if not found:
        raise ValueError(f"the page has no table below the heading {heading!r}")
    return found["table"]


def measured(file: Path, folder: Path, choice: str | None = None) -> str:
    """The rows of a file of docs/measured as a table for a page of a folder, and below it where they are from.

    A choice, `column = value`, leaves out the other rows, and this column. Raises ValueError if no row has the value.
    """
    rows = stored(file)
    link = f"From [{file.name}]({file.relative_to(folder)})"
    if choice:
        column, _, value = choice.partition(" = ")
        chosen = [{name: row[name] for name in row if name != column} for row in rows if row.get(column) == value]
        if not chosen:
            raise ValueError(f"{file} has no row whose {column!r} is {value!r}; choose another one")
        link = f"{link}, {len(chosen)} of its {len(rows)} rows"
        rows = chosen
    origins = dict.fromkeys(", ".join(filter(None, (row["machine"], row["date"]))) for row in rows)
    return f"{as_table(rows)}\n\n{link}: {'; '.join(origins)}.\n"


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
