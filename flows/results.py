"""What the last report says, on the terminal: `agent-r1 results`."""

from __future__ import annotations

import json

from rich.markdown import Markdown

from agent_r1 import params
from agent_r1.evaluation.scores import SUCCESS
from agent_r1.harmless import harmless_lines
from agent_r1.params import Params
from agent_r1.params.places import RunId
from flows.terminal import output

NEXT = """\
- the whole report: `{page}`
- the runs side by side in MLflow: `make ui`
- {agent}: `agent-r1 chat{words}`
"""


def results(sweep: str = "") -> None:
    """Prints the beginning of the page of a report, to its first table, and where to look next."""
    settings = params.load()
    page = settings.places.report(sweep) / "report.md"
    if not page.exists():
        raise ValueError(f"{page} does not exist; the stage `report` writes it, at the end of `make repro`")
    _, about, *parts = harmless_lines(page.read_text()).split("\n\n")
    shown = [about, *(part for part in parts if part.startswith("|"))][:2]
    best = _best(settings, sweep)
    agent = "the best run of the report" if best else "the untrained warm start"
    following = NEXT.format(page=page, agent=agent, words="".join(f" {word}" for word in best.words) if best else "")
    output().print(Markdown("\n\n".join([*shown, following])))


def _best(settings: Params, sweep: str) -> RunId | None:
    """The training of the report with the highest success, the first of several; None where no run was evaluated."""
    swept = settings.ablations
    of_sweep = [RunId(run, seed, sweep) for run in swept.runs for seed in swept.seeds_of(run)]
    runs = of_sweep if sweep else [RunId(run) for run in settings.repro_runs]
    files = {run: settings.places.evaluation(run.label, sweep) / "scores.json" for run in runs}
    found = {run: json.loads(file.read_text())[SUCCESS] for run, file in files.items() if file.exists()}
    return max(found, key=lambda run: found[run], default=None)
