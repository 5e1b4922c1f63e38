"""Commands for a user's own code and data."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

from rich.text import Text
from typer import Argument, Option

from agent_r1.params.places import RunId
from flows.commands.options import Model, app, completed_runs
from flows.terminal import output

PANEL = "Make it yours"


@app.command(rich_help_panel=PANEL)
def new(
    kind: Literal["tool", "reward", "world", "data"],
    name: Annotated[str, Argument(help="Of its module or folder, its test and its overlay.")],
) -> None:
    """Writes a tool, reward, world or data set to begin with."""
    from flows.new import begin

    written, following = begin(kind, name)
    output().print(Text("\n".join([f"wrote {path}" for path in written]) + f"\n\n{following}", end=""))


@app.command("try", rich_help_panel=PANEL)
def try_run(
    run: Annotated[str, Argument(autocompletion=completed_runs, help="A name under runs: in params.yaml.")],
    model: Model = None,
    endpoint: Annotated[
        str | None,
        Option(metavar="URL", help="OpenAI-compatible, where --model is a name; its key: AGENT_R1_ENDPOINT_KEY."),
    ] = None,
) -> None:
    """Plays five episodes of a run, and shows what they earn.

    Without --model the run's policy plays; before its training the warm start.
    """
    from flows.tryout import play

    logging.getLogger("agent_r1").setLevel(logging.WARNING)  # it has a line per engine
    for shown in play(RunId.parse(run), model, endpoint):
        output().print(Text(shown))
