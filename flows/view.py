"""The page and the traces of a run's trajectories: `python -m flows view --run NAME`."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent_r1 import params
from agent_r1.inspection.viewer import show
from agent_r1.params import RunId
from flows.stage import add_run_arguments, run_stage


def view(
    run: str,
    seed: int | None = None,
    sweep: str = "",
    out: str | None = None,
    trajectories: int = 200,
    traces: int = 20,
) -> None:
    """Makes the page of a training's trajectories, and traces of some of them; see `show`."""
    file = Path(out) if out else None
    show(params.load(), RunId.named(run, seed, sweep), file, trajectories=trajectories, traces=traces)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a page of a run's trajectories, and traces in MLflow.")
    add_run_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="the page, in place of outputs/view/LABEL.html")
    parser.add_argument("--trajectories", type=int, default=200, help="on the page, at most (default: 200)")
    parser.add_argument("--traces", type=int, default=20, help="of them in MLflow, at most; 0 for none (default: 20)")
    run_stage(view, **vars(parser.parse_args()))
