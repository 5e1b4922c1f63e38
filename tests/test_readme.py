"""The figures of README.md and of the pages of docs/ are those of stored results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.stored import ORIGIN, keep, stored
from docs.results import BLOCK, PAGES, filled, table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# Where git keeps the scores that a report of docs/ shows, and below which heading.
SCORES = {"docs/report/report.md": "outputs/scores", "docs/ablations/report.md": "outputs/ablations/scores"}
MEASURED = sorted((ROOT / "docs" / "measured").glob("*.csv"))
BARE = re.compile(r"(?<![\d.])-?\.\d{2,3}(?!\d)(?: \[-?\.\d{3}, -?\.\d{3}\])?")  # with its interval, if there is one
QUANTITY = re.compile(r"(?<![\w.,])(?:\d[\d,]*)?\.?\d+ (?:ms|s|min|minutes|[kMGT]B|GiB)\b")
CHOSEN = {  # what somebody set, and nobody measured: limits, lambdas, chances
    *("5 MB", "1 MB", "1 GB", "8 minutes", "10 minutes", "80 GB", ".1 s", "5 s"),
    *(".95", ".25"),
}

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@by_page
def test_tables_hold_what_is_stored(page: Path) -> None:
    text = page.read_text()
    assert filled(text, page.parent) == text, "python -m docs.results fills them"
    for block in BLOCK.finditer(text):
        other = re.sub(r"\d", "7", block[0].removeprefix(block["mark"]))
        assert filled(text.replace(block[0], block["mark"] + other), page.parent) == text


@by_page
def test_other_tables_hold_no_figures(page: Path) -> None:
    cells = [
        cell.strip()
        for line in BLOCK.sub("", page.read_text()).splitlines()
        if line.startswith("|")
        for cell in re.split(r"(?<!\\)\|", line)
    ]
    assert [cell for cell in cells if re.match(r"\W*(\d*\.\d|[\d,]+( \w+)?$)", cell)] == []


@by_page
def test_figures_in_sentences_are_stored(page: Path) -> None:
    prose = _plain(re.sub(r"```.*?```|^\|.*?$", "", BLOCK.sub("", page.read_text()), flags=re.DOTALL | re.MULTILINE))
    reports = _plain("".join(map(Path.read_text, sorted((ROOT / "docs").glob("*/report.md")))))
    measured = _plain(" ".join(cell for file in MEASURED for row in stored(file) for cell in row.values()))
    minutes = {f"{figure} minutes" for figure in re.findall(r"\| (\d+\.\d) \|", reports)}  # of a training, per seed
    known = {*QUANTITY.findall(measured), *minutes, *BARE.findall(reports), *re.findall(r"-?\.\d{2,3}", measured)}
    known |= {each.split()[0] for each in known if "[" in each} | CHOSEN
    assert [each for each in (*QUANTITY.findall(prose), *BARE.findall(prose)) if each not in known] == []


def test_figures_are_looked_for() -> None:
    assert BARE.findall(_plain("by +0.062 [+.001, +.137], `lam: .95`, 3.72")) == [".062 [.001, .137]"]
    assert QUANTITY.findall(_plain("in 1.9 s and\n0.72 GB, 33 ms of 1,000 s, 32 MiB")) == [
        "1.9 s",
        ".72 GB",
        "33 ms",
        "1,000 s",
    ]


def _plain(text: str) -> str:
    """Without code and signs, on one line, a half as .5."""
    return re.sub(r"\b0(?=\.\d)|\+", "", " ".join(re.sub(r"`[^`]*`", "", text).split()))


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.stem)
def test_what_was_measured_says_how_when_and_on_what(file: Path) -> None:
    for row in stored(file):
        assert tuple(row)[-3:] == ORIGIN
        assert row["command"].startswith(("python -m benchmarks.", "agent-r1 ", "by hand: "))
        assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", row["date"])
        assert row["machine"]


def test_a_row_that_is_measured_again_takes_its_place(tmp_path: Path) -> None:
    file = tmp_path / "kept.csv"
    keep(file, [{"what": "first", "took": "1 s"}, {"what": "second", "took": "2 s"}])
    keep(file, [{"what": "first", "took": "3 s"}])
    assert [(row["what"], row["took"]) for row in stored(file)] == [("first", "3 s"), ("second", "2 s")]
    with pytest.raises(ValueError, match="other columns than what was measured, what, took, of"):
        keep(file, [{"what": "first", "took": "3 s", "of": "4 s"}])
    assert len(stored(file)) == 2


def test_a_block_that_is_filled_the_first_time_stands_alone() -> None:
    mark = "<!-- docs/report/report.md: Exact match -->\n"
    for empty in (f"Before.\n\n{mark}\nAfter.\n", f"Before.\n\n{mark}After.\n", f"Before.\n\n{mark}"):
        text = filled(empty, ROOT)
        assert filled(text, ROOT) == text
        assert re.fullmatch(rf"Before\.\n\n{mark}\n(\|.*\n)+(\nAfter\.\n)?", text)


@pytest.mark.parametrize("page", SCORES)
def test_reports_say_what_the_scores_in_git_say(page: str) -> None:
    rows = [line.split("|")[1:3] for line in table((ROOT / page).read_text(), "Exact match").splitlines()[2:]]
    shown = {name.strip(" `"): score.split()[0] for name, score in rows}
    stored = {path.stem: json.loads(path.read_text()) for path in (ROOT / SCORES[page]).glob("*.json")}
    assert shown == {name: f"{scores['success']:.3f}" for name, scores in stored.items()}


def test_a_heading_without_a_table_is_told() -> None:
    page = "# Report\n\nText.\n\n## Exact match\n\nMore.\n\n| a |\n|---|\n| 1 |\n\n## Next\n\n| b |\n"
    assert table(page, "Exact match") == "| a |\n|---|\n| 1 |\n"
    with pytest.raises(ValueError, match="no table below the heading 'Report'"):
        table(page, "Report")
