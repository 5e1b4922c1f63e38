"""The application, and the options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from agent_r1 import params
from agent_r1.params.places import RunId
from flows.stage import prepare_process

ABOUT = "Trains tool-using language-model agents with reinforcement learning, as a tracked pipeline."
app = typer.Typer(help=ABOUT, no_args_is_help=True)


@app.callback()
def prepared() -> None:
    prepare_process()


def completed_runs(incomplete: str) -> list[str]:
    """The runs of params.yaml that begin so; none if the file cannot be read."""
    try:
        return [name for name in params.load().runs if name.startswith(incomplete)]
    except (ValueError, OSError):
        return []


def completed_overlays(incomplete: str) -> list[str]:
    return [path.stem for path in sorted(Path("overlays").glob("*.yaml")) if path.stem.startswith(incomplete)]


def acting(run: str | None, seed: int | None, sweep: str | None, model: str | None) -> RunId | str:
    """The word for the policy that the options name; "" if they name none."""
    if run and model:
        raise ValueError("--run and --model each name a policy; give one of them")
    if run:
        return RunId.named(run, seed, sweep or "")
    if seed is not None or sweep:
        raise ValueError("--seed and --sweep tell apart runs; give --run, or leave them out")
    return model or ""


# Options that name a training: the fields of a `RunId`.
_RUN = Option("--run", autocompletion=completed_runs, help="A name under runs: in params.yaml, or a variant of one.")
OneRun = Annotated[str, _RUN]
Label = Annotated[str, Argument(metavar="RUN", autocompletion=completed_runs, help="The label of a run, such as ppo.")]
RunName = Annotated[str | None, _RUN]
SeedOption = Annotated[int | None, Option(help="In place of the run's own; its outputs have folders of their own.")]
Sweep = Annotated[Literal["ablations"] | None, Option(help="Of this sweep of params.yaml, with places of its own.")]

# Options that name any other policy, and how it acts.
Model = Annotated[
    str | None,
    Option(help="In place of --run: ppo-seed3, models:/agent_r1@champion, or a folder or hub id with a chat template."),
]
Served = Annotated[
    str | None,
    Option(metavar="URL", help="OpenAI-compatible, where --model is a name; its key: AGENT_R1_ENDPOINT_KEY."),
]
Temperature = Annotated[float, Option(min=0.0, max=100.0, help="0 is greedy; trainings sample at 1.")]
