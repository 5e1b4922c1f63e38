"""The application, and the options that mean the same wherever they are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from agent_r1 import params
from flows.stage import prepare_process

app = typer.Typer(
    help="Trains tool-using language-model agents with reinforcement learning, as a tracked pipeline.",
    no_args_is_help=True,
)


@app.callback()
def prepared() -> None:
    prepare_process()


def completed_runs(incomplete: str) -> list[str]:
    """The runs of params.yaml that begin so; none where it cannot be read."""
    try:
        return [name for name in params.load().runs if name.startswith(incomplete)]
    except (ValueError, OSError):
        return []


def completed_overlays(incomplete: str) -> list[str]:
    return [path.stem for path in sorted(Path("overlays").glob("*.yaml")) if path.stem.startswith(incomplete)]


# Which training is meant: the fields of a `RunId`.
OneRun = Annotated[
    str,
    Option("--run", autocompletion=completed_runs, help="A name under runs: in params.yaml, or a variant of one."),
]
RunName = Annotated[
    str | None,
    Option("--run", autocompletion=completed_runs, help="A name under runs: in params.yaml, or a variant of one."),
]
Seed = Annotated[int | None, Option(help="In place of the run's own; its outputs have folders of their own.")]
Sweep = Annotated[Literal["ablations"] | None, Option(help="Of this sweep of params.yaml, with places of its own.")]

# Which policy, where it is none of a training.
Model = Annotated[
    str | None, Option(help="In place of --run: models:/agent_r1@champion, or a folder or hub id with a chat template.")
]
Temperature = Annotated[float, Option(min=0.0, max=100.0, help="0 is greedy; trainings sample at 1.")]
