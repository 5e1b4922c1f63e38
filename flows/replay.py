"""What stored trajectories teach under another configuration: `python -m flows replay --run NAME --as OTHER`.

Nothing is generated and nothing is written, so a replay holds no lock and disturbs no training.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_r1.project import train_dir
from rich.console import Console
from rich.progress import track

from agent_r1 import params
from agent_r1.inspection.replay import Replayed, Replayer, configurations, tables
from agent_r1.inspection.stored import StoredRun
from flows.stage import add_member_arguments


def replay(
    run: str,
    others: Sequence[str],
    changes: Sequence[str] = (),
    *,
    seed: int | None = None,
    sweep: str | None = None,
    iterations: Sequence[str] = (),
    folder: Path | None = None,
    with_gradient: bool = True,
) -> list[Replayed]:
    """Credits stored trajectories as their run did and as other configurations would, and compares.

    Args:
        run: whose trajectories; its own configuration is the one in params.yaml.
        others: runs whose `credit` and `update` take the place of the run's; the run itself when empty.
        changes: `credit.lam=1.0` and the like, on top of each of them.
        seed: of the run, where it was trained with another than its own.
        sweep: that the run was trained in.
        iterations: see `StoredRun.choose`.
        folder: of the run's files, where it is not the one that training uses.
        with_gradient: whether gradients are compared too, in iterations whose policy is on disk.

    Raises:
        FileNotFoundError: the run has no finished iteration.
        ValueError: a configuration is refused, or needs what the run did not store.
    """
    settings = params.load()
    compared = configurations(settings, run, others, changes)
    stored = StoredRun(run, folder or train_dir(run, seed, sweep))
    chosen = stored.choose(iterations)
    replayer = Replayer(stored, compared, settings, with_gradient=with_gradient)
    return [replayer.replay(number) for number in track(chosen, "replay", disable=not sys.stderr.isatty())]


def main() -> None:
    """The command line: replays and prints tables."""
    parser = argparse.ArgumentParser(description="Replays stored trajectories under another configuration.")
    parser.add_argument("--run", required=True, help="the run whose trajectories are replayed")
    parser.add_argument("--as", dest="others", action="append", default=[], metavar="RUN", help="may be given again")
    parser.add_argument("--set", dest="changes", nargs="+", default=[], metavar="KEY=VALUE", help="credit.lam=1.0, ...")
    parser.add_argument(
        "--iteration",
        dest="iterations",
        nargs="+",
        default=[],
        metavar="N",
        help="numbers or all; else the last that the warm start sampled, and the last",
    )
    add_member_arguments(parser)
    parser.add_argument("--folder", type=Path, help="of the run's files, if not outputs/train/RUN")
    parser.add_argument("--no-gradient", dest="with_gradient", action="store_false", help="compares credit alone")
    given = parser.parse_args()
    if not given.others and not given.changes:
        parser.error("nothing to compare with: give --as, --set or both")
    logging.getLogger("agent_r1.credit").setLevel(logging.WARNING)  # it has a line per iteration and configuration
    for part in tables(replay(**vars(given))):
        console().print(part)


def console() -> Console:
    """As wide as the terminal, or wide enough for the tables."""
    return Console() if sys.stdout.isatty() else Console(width=120)


if __name__ == "__main__":
    from flows.stage import clean_end, keep_freed_memory

    keep_freed_memory()
    with clean_end():
        main()
