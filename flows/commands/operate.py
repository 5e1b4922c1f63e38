"""Commands that operate trained policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from agent_r1 import params
from flows.commands.options import Model, RunName, SeedOption, Sweep, acting, app
from flows.stage import report_to_own_server

PANEL = "Operate"


@app.command(rich_help_panel=PANEL)
def promote(
    challenger: Annotated[str, Argument(metavar="REFERENCE", help="models:/agent_r1/3, or the label of a training.")],
    first: Annotated[bool, Option("--first", help="Makes it the first champion, compared with nothing.")] = False,
    anyway: Annotated[bool, Option("--anyway", help="Also if the world cut episodes short.")] = False,
    tag: Annotated[bool, Option("--tag", help="Commits and tags the champion, for `dvc artifacts get`.")] = False,
) -> None:
    """Makes a challenger the champion, if it is better.

    Better beyond chance: the lower bound of the paired difference is above `promote.margin`.
    """
    from flows.operation.promote import promote_here

    promote_here(challenger, first=first, anyway=anyway, tag=tag)


@app.command(rich_help_panel=PANEL)
def export(
    to: Annotated[Path, Option(metavar="FOLDER", help="That is not there yet.")],
    license_name: Annotated[
        str, Option("--license", metavar="NAME", help="Of the weights, as Hugging Face calls it: apache-2.0, other.")
    ],
    run: RunName = None,
    seed: SeedOption = None,
    sweep: Sweep = None,
    model: Model = None,
) -> None:
    """Writes a policy as a folder for others, with a model card."""
    from flows.operation.export import export as written
    from flows.policies import policy_of

    settings = params.load()
    policy = policy_of(settings, acting(run, seed, sweep, model))
    written(policy.as_trained(settings), policy, to, license_name)


@app.command(rich_help_panel=PANEL)
def doctor(
    checks: Annotated[list[str] | None, Argument(metavar="CHECK", help="versions, room, ...; all without one.")] = None,
    engine: Annotated[bool, Option("--engine", help="The engine's check alone, with all that it says.")] = False,
) -> None:
    """Checks whether this machine is fit, with remedies."""
    from flows.operation.doctor import doctor as examined

    examined(checks or [], engine=engine)


@app.command(rich_help_panel=PANEL)
def deploy(
    restarted: Annotated[
        bool, Option("--restarted", help="The server was just started and has no worker yet.")
    ] = False,
) -> None:
    """Puts the deployments on a Prefect server.

    It is that of PREFECT_API_URL, and gets the work pool too.
    """
    from flows.operation.deploy import deploy as put

    put(restarted=restarted)


@app.command(rich_help_panel=PANEL)
def worker(
    pool: Annotated[str, Option(metavar="NAME", help="Of the Prefect server; made where it is not there.")],
    limit: Annotated[int, Option(min=1, help="Stages at a time: as many as this machine has GPUs for them.")] = 1,
) -> None:
    """Makes stages for other clones.

    `agent-r1 pipeline --pool` sends them. The clone needs the commit, the PREFECT_API_URL, the MLFLOW_TRACKING_URI and
    the remote of DVC that the others have.
    """
    report_to_own_server()
    from flows.operation.worker import work

    work(pool, limit)
