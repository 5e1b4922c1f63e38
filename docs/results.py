"""Puts a report into docs/ and its tables into README.md: `python docs/results.py report outputs/report`.

A block of README.md begins with the page and the heading that its table is taken from. A test holds it to that page.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"(?P<mark><!-- (?P<page>docs/\S+): (?P<heading>.+) -->\n\n)(?:\|.*\n)*")


def filled(text: str) -> str:
    """A text whose blocks hold the tables of the pages that they name."""
    return BLOCK.sub(lambda block: block["mark"] + table((ROOT / block["page"]).read_text(), block["heading"]), text)


def table(page: str, heading: str) -> str:
    """The first table below a heading of a page. Raises ValueError if there is none."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(?:(?!#|\|).*\n)*(?P<table>(?:\|.*\n)+)", page, re.MULTILINE)
    if not found:
        raise ValueError(f"the page has no table below the heading {heading!r}")
    return found["table"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts a report into docs/ and its tables into README.md.")
    parser.add_argument("name", help="of the folder in docs/ that the report replaces")
    parser.add_argument("report", type=Path, help="the folder of the report")
    given = parser.parse_args()
    kept = ROOT / "docs" / given.name
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(given.report, kept)
    README.write_text(filled(README.read_text()))


if __name__ == "__main__":
    main()
