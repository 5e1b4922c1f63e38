"""What the last report says, on the terminal: `agent-r1 results`."""

from __future__ import annotations

from rich.markdown import Markdown

from agent_r1 import params
from agent_r1.harmless import harmless_lines
from flows.terminal import output

NEXT = """\
- the whole report: `{page}`
- the runs side by side in MLflow: `make ui`
- the agent itself: `agent-r1 chat`
"""


def results(sweep: str = "") -> None:
    """Prints the beginning of the page of a report, to its first table, and where to look next."""
    page = params.load().places.report(sweep) / "report.md"
    if not page.exists():
        raise ValueError(f"{page} does not exist; the stage `report` writes it, at the end of `make repro`")
    _, about, *parts = harmless_lines(page.read_text()).split("\n\n")
    shown = [about, *(part for part in parts if part.startswith("|"))][:2]
    output().print(Markdown("\n\n".join([*shown, NEXT.format(page=page)])))
