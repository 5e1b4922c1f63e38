"""The figures of README.md are those of stored results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.results import BLOCK, filled, table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# Where git keeps the scores that a report of docs/ shows, and below which heading.
SCORES = {"docs/report/report.md": "outputs/scores", "docs/ablations/report.md": "outputs/ablations/scores"}


def test_tables_hold_what_the_reports_say() -> None:
    assert filled(README) == README, "python docs/results.py NAME FOLDER fills them"
    [first, *_] = BLOCK.finditer(README)
    other = first[0].replace("0.", "0.1")
    assert filled(README.replace(first[0], other)) == README != README.replace(first[0], other)


def test_intervals_stand_in_such_tables_alone() -> None:
    outside = BLOCK.sub("", README)
    assert [line for line in outside.splitlines() if line.startswith("|") and re.search(r"\[[-+]?\d?\.\d", line)] == []


def test_figures_in_sentences_stand_in_the_reports() -> None:
    """With its interval where there is one."""
    figure = re.compile(r"(?<![\d.])-?\.\d{2,3}(?!\d)(?: \[-?\.\d{3}, -?\.\d{3}\])?")
    pages, said = (
        figure.findall(re.sub(r"\b0(?=\.\d)|\+", "", " ".join(text.split())))
        for text in ("".join(map(Path.read_text, sorted((ROOT / "docs").glob("*/report.md")))), BLOCK.sub("", README))
    )
    stored = {*pages, *(each.split()[0] for each in pages)}
    assert len(said) > 5
    assert [each for each in said if each not in stored] == []


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
