"""Stored trajectories under another configuration: `python -m flows replay --run NAME --as OTHER`.

Nothing is generated and nothing is written, so a replay holds no lock and disturbs no training.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from rich.console import Console

from agent_r1 import params
from agent_r1.inspection.replay import replay, tables
from agent_r1.params import RunId
from flows.stage import add_run_arguments


def main() -> None:
    """The command line: replays and prints tables, as wide as the terminal or wide enough."""
    parser = argparse.ArgumentParser(description="Replays stored trajectories under another configuration.")
    add_run_arguments(parser)
    parser.add_argument("--as", dest="others", action="append", default=[], metavar="RUN", help="may be given again")
    parser.add_argument("--set", dest="changes", nargs="+", default=[], metavar="KEY=VALUE", help="credit.lam=1.0, ...")
    of_iterations = "numbers or all; else the last that the warm start sampled, and the last"
    parser.add_argument("--iteration", dest="iterations", nargs="+", default=[], metavar="N", help=of_iterations)
    parser.add_argument("--folder", type=Path, help="of the run's files, if not outputs/train/RUN")
    parser.add_argument("--no-gradient", dest="with_gradient", action="store_false", help="compares credit alone")
    given = parser.parse_args()
    if not given.others and not given.changes:
        parser.error("nothing to compare with: give --as, --set or both")
    logging.getLogger("agent_r1.credit").setLevel(logging.WARNING)  # it has a line per iteration and configuration
    replayed = replay(
        params.load(),
        RunId.named(given.run, given.seed, given.sweep),
        given.others,
        given.changes,
        folder=given.folder,
        iterations=given.iterations,
        with_gradient=given.with_gradient,
    )
    console = Console(width=None if sys.stdout.isatty() else 120)
    for part in tables(replayed):
        console.print(part)
