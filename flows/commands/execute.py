"""Commands that run the graph and its stages."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from typer import Argument, Option

from agent_r1 import params
from agent_r1.params.places import RunId
from agent_r1.params.stages import Baseline, Budget, Protocol
from flows.commands.options import Imported, Label, OfPolicy, Served, Sweep, app, completed_overlays, completed_runs
from flows.stage import report_to_own_server, run_stage
from flows.terminal import show

PANEL = "Run the graph"

logger = logging.getLogger(__name__)


def prepare() -> None:
    """Writes the questions and the passages of the configured data sets."""
    from agent_r1.data.prepare import prepare as write

    settings = params.load()
    settings.require_watched()
    write(settings.prepare, settings.places.prepared, searched=settings.search.own_passages)


app.command("prepare", rich_help_panel=PANEL, help="Writes questions and passages.")(lambda: run_stage(prepare))


def index() -> None:
    """Builds the configured index over the prepared passages."""
    from agent_r1.search.index import build, describe

    settings = params.load()
    search = settings.search
    folder = settings.places.index
    start = time.perf_counter()
    build(search, settings.places.passages, folder)
    seconds = time.perf_counter() - start
    megabytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
    size = describe(folder).size
    logger.info("built the %s index of %d passages: %.1f MB in %.1f s", search.kind, size, megabytes, seconds)


app.command("index", rich_help_panel=PANEL, help="Builds the index over the passages.")(lambda: run_stage(index))


@app.command("warm-start", rich_help_panel=PANEL)
def warm_start() -> None:
    """Makes the policy that trainings start from."""
    from flows.warm_start import start

    start()


@app.command(cls=OfPolicy, rich_help_panel=PANEL)
def train(
    run: Label,
    fresh: Annotated[bool, Option("--fresh", help="Starts over, and moves the earlier training aside.")] = False,
) -> None:
    """Trains a run of params.yaml, or goes on with it."""
    from flows.train import start

    start(RunId.meant(run), fresh=fresh)


@app.command(cls=OfPolicy, rich_help_panel=PANEL)
def register(run: Label) -> None:
    """Registers the policy that a training finished with."""
    from flows.operation.register import register as stage

    run_stage(stage, run=RunId.meant(run))


def completed_subjects(incomplete: str) -> list[str]:
    """Runs and baselines that begin so."""
    return [*completed_runs(incomplete), *(name for name in get_args(Baseline) if name.startswith(incomplete))]


@app.command(cls=OfPolicy, rich_help_panel=PANEL)
def evaluate(
    policy: Annotated[
        str,
        Argument(autocompletion=completed_subjects, help="As of `chat`, or a baseline such as random, of a sweep too."),
    ],
    endpoint: Served = None,
    protocol: Annotated[Protocol | None, Option(help="In place of tool_call, how runs are trained.")] = None,
    dataset: Annotated[str | None, Option(help="Asks the questions of this prepared data set alone.")] = None,
    as_label: Annotated[
        str | None, Option("--as", metavar="LABEL", help="Names the results: outputs/evaluate/LABEL.")
    ] = None,
    into: Annotated[
        Path | None, Option(metavar="FOLDER", help="Takes the results, in place of outputs/evaluate/LABEL.")
    ] = None,
) -> None:
    """Puts the test questions to any policy."""
    from flows.evaluate import EvaluationRequest
    from flows.evaluate import evaluate as stage

    request = EvaluationRequest(
        RunId.exact(policy), endpoint=endpoint, protocol=protocol, dataset=dataset, as_label=as_label, into=into
    )
    run_stage(stage, request=request)


@app.command(rich_help_panel=PANEL)
def report(
    sweep: Sweep = None,
    beside: Annotated[
        str,
        Option(metavar="LABELS", help="Further evaluations as baselines, commas between; in outputs/report_beside."),
    ] = "",
    over: Annotated[
        Budget | None, Option(help="Draws curves over this, in place of iterations; in outputs/report_beside.")
    ] = None,
    imported: Imported = None,
) -> None:
    """Compares the runs that were evaluated."""
    from flows.imported import report_imported
    from flows.report import report as stage

    if imported and (sweep or beside or over):
        raise ValueError("--imported has a report of its own; leave out --sweep, --beside and --over")
    if imported:
        run_stage(report_imported, patterns=imported)
        return
    run_stage(stage, sweep=sweep or "", beside=beside, over=over)


@app.command(rich_help_panel=PANEL)
def pipeline(
    sweep: Sweep = None,
    pool: Annotated[
        str, Option(metavar="NAME", help="Its workers make the stages that compute; see `agent-r1 worker`.")
    ] = "",
) -> None:
    """Runs stages that are out of date as one Prefect flow."""
    report_to_own_server()
    from flows.pipeline import run_pipeline

    run_pipeline(sweep or "", pool)


@app.command(rich_help_panel=PANEL)
def overlay(
    name: Annotated[
        str, Argument(autocompletion=completed_overlays, help="Of a file in overlays/, without .yaml; or base.")
    ],
) -> None:
    """Switches params.yaml to another scale, and back."""
    from flows.overlay import switch

    switch(name)


@app.command(rich_help_panel=PANEL)
def new(
    kind: Literal["project", "tool", "reward", "world", "data", "examples"],
    name: Annotated[
        str, Argument(help="Of its module or folder and its test, of a data set, or the project's folder.")
    ],
    overlay: Annotated[
        str, Option("--from", autocompletion=completed_overlays, help="Of a project: the overlay that it begins with.")
    ] = "",
    changes: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Of a project: parameters on top; may be given again."),
    ] = None,
) -> None:
    """Begins a project, tool, reward, world or data."""
    from flows.new import begin, write_examples
    from flows.project import begin_project

    if (overlay or changes) and kind != "project":
        raise ValueError(f"--from and --set have no effect on a {kind}; they are for `agent-r1 new project`")
    if kind == "project":
        show(begin_project(Path(name), overlay, changes or []))
    else:
        show(write_examples(name) if kind == "examples" else begin(kind, name))


@app.command(rich_help_panel=PANEL)
def update(
    yes: Annotated[bool, Option("--yes", help="Also does it, without asking.")] = False,
) -> None:
    """Brings your project up to the installed package."""
    from flows.update import plan, take

    changes = plan()
    show(changes.in_words)
    if changes.files and (yes or (sys.stdin.isatty() and typer.confirm("Do this?"))):
        take(changes)
