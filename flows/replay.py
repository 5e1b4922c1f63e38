"""Stored trajectories under another configuration: `agent-r1 replay --run NAME --as OTHER`.

Nothing is generated and nothing is written, so a replay holds no lock and disturbs no training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from agent_r1 import params
from agent_r1.inspection import replay as stored
from agent_r1.inspection.replay import tables
from agent_r1.params.places import RunId
from flows.terminal import output


def replay(
    run: str,
    seed: int | None,
    sweep: str,
    others: Sequence[str],
    changes: Sequence[str],
    *,
    folder: Path | None,
    iterations: Sequence[str],
    with_gradient: bool,
) -> None:
    """Replays and prints tables, as wide as the terminal or wide enough; see `agent_r1.inspection.replay`."""
    if not others and not changes:
        raise ValueError("nothing to compare with: give --as, --set or both")
    logging.getLogger("agent_r1.credit").setLevel(logging.WARNING)  # it has a line per iteration and configuration
    replayed = stored.replay(
        params.load(),
        RunId.named(run, seed, sweep),
        others,
        changes,
        folder=folder,
        iterations=iterations,
        with_gradient=with_gradient,
    )
    console = output()
    for part in tables(replayed):
        console.print(part)
