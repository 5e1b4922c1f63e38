"""Pieces of a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.evaluation.statistics import Interval


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names things and whose others hold numbers."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def code(names: Sequence[str]) -> str:
    """The names, set as code."""
    return ", ".join(f"`{name}`" for name in names)


def mean(found: Interval, decimals: int = 3) -> str:
    """A mean with its interval, which has one decimal less: 0.750 [0.70, 0.80]."""
    return f"{found.mean:.{decimals}f} [{found.low:.{decimals - 1}f}, {found.high:.{decimals - 1}f}]"


def difference(found: Interval) -> str:
    """A signed difference with its interval, bold where the interval leaves out 0."""
    text = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    return f"**{text}**" if found.excludes_zero else text
