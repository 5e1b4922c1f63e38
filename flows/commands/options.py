"""The application, its words for policies, and the options that several commands take."""

from __future__ import annotations

import argparse
import logging
import sys
from glob import escape
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from agent_r1 import params
from agent_r1.params.places import REPRO
from agent_r1.surroundings import execute_without_secrets
from flows.made_of import SHIPPED
from flows.stage import prepare_process, started_by_another

ABOUT = "Trains tool-using language-model agents with reinforcement learning, as a tracked pipeline."
EARLIER = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # options that named policies; dvc.yaml has them
for _option in ("--run", "--baseline", "--model", "--seed", "--sweep"):
    EARLIER.add_argument(_option)

logger = logging.getLogger(__name__)


class Hyphened(TyperGroup):
    """Commands whose names have hyphens, and are read with underscores too."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        name = cmd_name.replace("_", "-")
        _tell(cmd_name, name)
        return super().get_command(ctx, name)


class OfPolicy(TyperCommand):
    """A command whose first argument is a word for a policy, which earlier options are read as too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # of a completion
            args = in_one_word(args)
        return super().parse_args(ctx, args)


def in_one_word(args: list[str]) -> list[str]:
    """Arguments whose first is a word for a policy, where earlier options named it. Raises ValueError without one."""
    options, words = EARLIER.parse_known_args(args)
    words = [*filter(None, (options.run, options.baseline, options.model)), *words]
    graph = options.sweep or (REPRO if options.run else "")
    if graph or options.seed:
        if not words or words[0].startswith("-"):
            raise ValueError("--seed and --sweep tell apart runs; name one, such as ppo-seed3 or ablations/ppo-seed3")
        words[0] = "/".join(filter(None, (graph, words[0]))) + (f"-seed{options.seed}" if options.seed else "")
    _tell(" ".join(args), " ".join(words))
    return words


def _tell(old: str, new: str) -> None:
    if old != new and not started_by_another():
        logger.warning("%s is spelled %s now", old, new)


app = typer.Typer(help=ABOUT, no_args_is_help=True, cls=Hyphened)


@app.callback()
def prepared() -> None:
    settings = prepare_process()
    if settings and settings.env.agents:
        execute_without_secrets([sys.executable, "-m", "flows", *sys.argv[1:]])


def completed_runs(incomplete: str) -> list[str]:
    """The runs of params.yaml that begin so; none if the file cannot be read."""
    try:
        return [name for name in params.load().runs if name.startswith(incomplete)]
    except (ValueError, OSError):
        return []


def completed_overlays(incomplete: str) -> list[str]:
    folders = (SHIPPED / "overlays", Path("overlays"))
    return sorted({path.stem for folder in folders for path in folder.glob(f"{escape(incomplete)}*.yaml")})


# Words for a training, and for any policy.
Label = Annotated[
    str,
    Argument(metavar="RUN", autocompletion=completed_runs, help="Such as ppo, ppo-seed3 or ablations/ppo-seed3."),
]
_POLICY = Argument(
    metavar="POLICY",
    autocompletion=completed_runs,
    help="ppo-seed3, ablations/ppo-seed3, models:/agent_r1@champion, or a folder or hub id with a chat template.",
)
Word = Annotated[str, _POLICY]

Sweep = Annotated[Literal["ablations"] | None, Option(help="Of this sweep of params.yaml, with places of its own.")]
Imported = Annotated[
    list[str] | None,
    Option(metavar="PATTERN", help="In place of it, imported runs such as 'grpo-seed*'; may be given again."),
]
Model = Annotated[str, Option(metavar="POLICY", help="Plays in place of the run's own.")]
Served = Annotated[
    str | None,
    Option(
        metavar="URL", help="OpenAI-compatible, where the policy is a model's name; its key: AGENT_R1_ENDPOINT_KEY."
    ),
]
Temperature = Annotated[float, Option(min=0.0, max=100.0, help="0 is greedy; trainings sample at 1.")]
