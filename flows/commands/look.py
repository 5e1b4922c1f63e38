"""What shows what came of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from flows.commands.shared import Model, OneRun, RunName, Seed, Sweep, Temperature, app, completed_runs
from flows.stage import run_stage

PANEL = "Look at what came of it"


@app.command(rich_help_panel=PANEL)
def results(sweep: Sweep = None) -> None:
    """Prints what the last report says."""
    from flows.results import results as shown

    shown(sweep or "")


@app.command(rich_help_panel=PANEL)
def compare(
    a: Annotated[str, Argument(help="A label under outputs/evaluate, or the folder of an evaluation.")],
    b: Annotated[str, Argument(help="What A is compared with: differences are A less B.")],
    sweep: Sweep = None,
    anyway: Annotated[bool, Option("--anyway", help="Also where they were not measured alike.")] = False,
) -> None:
    """Holds two evaluations against each other."""
    from flows.compare import compare as shown

    shown(a, b, sweep=sweep or "", anyway=anyway)


@app.command(rich_help_panel=PANEL)
def chat(
    run: RunName = None,
    seed: Seed = None,
    sweep: Sweep = None,
    model: Model = None,
    endpoint: Annotated[
        str | None, Option(metavar="URL", help="Of `agent-r1 serve_agent`; its key: AGENT_R1_ENDPOINT_KEY.")
    ] = None,
    temperature: Temperature = 0.0,
    question: Annotated[str | None, Option(metavar="TEXT", help="Answers this one and ends.")] = None,
    draws: Annotated[int | None, Option(metavar="SEED", help="Of what is drawn with a temperature above 0.")] = None,
) -> None:
    """Asks an agent.

    Questions are typed, or one per line of standard input. Without --run and --model the warm start answers. Engine
    servers must not be those of a training.
    """
    from flows.chat import ask

    ask(run, seed, sweep or "", model, endpoint, temperature=temperature, question=question, draws=draws)


@app.command(rich_help_panel=PANEL)
def view(
    run: OneRun,
    seed: Seed = None,
    sweep: Sweep = None,
    out: Annotated[str | None, Option(metavar="FILE", help="In place of outputs/view/LABEL.html.")] = None,
    trajectories: Annotated[int, Option(help="On the page, at most.")] = 200,
    traces: Annotated[int, Option(help="Of them in MLflow, at most; 0 for none.")] = 20,
) -> None:
    """Makes the page of a training's trajectories."""
    from flows.view import view as stage

    run_stage(stage, run=run, seed=seed, sweep=sweep or "", out=out, trajectories=trajectories, traces=traces)


@app.command(rich_help_panel=PANEL)
def replay(
    run: OneRun,
    seed: Seed = None,
    sweep: Sweep = None,
    others: Annotated[
        list[str] | None, Option("--as", metavar="RUN", autocompletion=completed_runs, help="May be given again.")
    ] = None,
    changes: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="credit.lam=1.0, ...; may be given again.")
    ] = None,
    iterations: Annotated[
        list[str] | None,
        Option(
            "--iteration",
            metavar="N",
            help="A number, or all; may be given again. Else the last that the warm start sampled, and the last.",
        ),
    ] = None,
    folder: Annotated[Path | None, Option(help="Of the run's files, if not outputs/train/RUN.")] = None,
    gradient: Annotated[bool, Option("--gradient/--no-gradient", help="Or compares credit alone.")] = True,
) -> None:
    """Shows what stored trajectories teach otherwise.

    They are credited again under other runs, or with changed values; nothing is sampled and nothing is written.
    """
    from flows.replay import replay as shown

    shown(
        run,
        seed,
        sweep or "",
        others or [],
        changes or [],
        folder=folder,
        iterations=iterations or [],
        with_gradient=gradient,
    )


@app.command(rich_help_panel=PANEL)
def lineage(
    what: Annotated[
        str,
        Argument(
            metavar="MODEL|DATA",
            help="models:/agent_r1@champion, models:/agent_r1/3 or a label such as ppo; or a path such as "
            "data/prepared, a hash, a git revision.",
        ),
    ],
) -> None:
    """Shows what a model was made of, or which models data led to."""
    from rich.console import Console

    from flows.operation.lineage import lineage as shown

    shown(what, Console())
