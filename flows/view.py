"""The page and the traces of a run's trajectories: `agent-r1 view --run NAME`."""

from __future__ import annotations

from pathlib import Path

from agent_r1 import params
from agent_r1.inspection.viewer import show
from agent_r1.params.places import RunId


def view(run: RunId, out: Path | None = None, trajectories: int = 200, traces: int = 20) -> None:
    """Makes the page of a training's trajectories, and traces of some of them; see `show`."""
    show(params.load(), run, out, trajectories=trajectories, traces=traces)
