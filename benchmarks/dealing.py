"""How evenly ranks share the work of a training: `python -m benchmarks.dealing [--run RUN] [--store]`, from the root.

Deals every optimiser step of the policy out, from the trajectories of a training that is there, as so many ranks would.
A trajectory costs its tokens, with the padding where contexts are not packed; what grows with their square is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from agent_r1.learn.scoring import deal, minibatches
from agent_r1.params import load
from agent_r1.params.places import RunId
from agent_r1.records import Trajectory
from agent_r1.tables import read_rows
from benchmarks.stored import Row, options, show

RANKS = (2, 4, 8, 16, 32)

Lengths = Sequence[Sequence[int]]  # the tokens of each context of each trajectory


def steps(run: str) -> tuple[list[Lengths], int]:
    """What each optimiser step of a training learns from, and the most tokens of a micro-batch.

    Raises ValueError if there is no such training here.
    """
    settings = load()
    meant = RunId.meant(run)
    config, folder = settings.run(meant), settings.places.training(meant)
    files = sorted((folder / "trajectories").glob("*.parquet"))
    if not files:
        raise ValueError(f"{folder} has no trajectories; train {run} first")
    found: list[Lengths] = []
    for iteration, file in enumerate(files):
        lengths = [[span.stop - span.start for span in row.contexts] for row in read_rows(file, Trajectory)]
        found += minibatches(lengths, config.update, seed=config.seed, iteration=iteration)
    return found, config.update.max_tokens_per_microbatch


def costs(lengths: Lengths, max_tokens: int, ranks: int, packed: bool) -> NDArray[np.float64]:
    """What each rank has in each turn [ranks, turns], in tokens."""

    def of_rank(rank: int) -> Iterator[int]:
        for pack, idle in deal(lengths, max_tokens, packed=packed, rank=rank, ranks=ranks):
            contexts = [length for index in pack for length in lengths[index]]
            cost = sum(contexts) if packed else max(contexts) * len(contexts)
            yield 0 if idle else cost

    return np.array([[*of_rank(rank)] for rank in range(ranks)], float)


def row(ranks: int, packed: bool, dealt: Sequence[Lengths], max_tokens: int) -> Row:
    """Means over the steps."""
    found = [costs(lengths, max_tokens, ranks, packed) for lengths in dealt]
    tokens = [sum(sum(contexts) for contexts in lengths) for lengths in dealt]
    busiest = [each.sum(axis=1).max() / each.sum(axis=1).mean() for each in found]
    waiting = [each.max(axis=0).sum() / each.mean(axis=0).sum() for each in found]
    ideal = [each.max(axis=0).sum() * ranks / real for each, real in zip(found, tokens, strict=True)]
    return {
        "ranks": str(ranks),
        "contexts": "packed" if packed else "padded",
        "trajectories of each": f"{np.mean([len(lengths) for lengths in dealt]) / ranks:.0f}",
        "turns": f"{np.mean([each.shape[1] for each in found]):.1f}",
        "busiest rank / mean": f"{np.mean(busiest):.2f}",
        "slowest of each turn / mean": f"{np.mean(waiting):.2f}",
        "the same / tokens without padding": f"{np.mean(ideal):.2f}",
    }


def main() -> None:
    parser = options("Deals the work of a training out to ranks.")
    parser.add_argument("--run", default="ppo")
    given = parser.parse_args()
    dealt, max_tokens = steps(given.run)
    rows = [row(ranks, packed, dealt, max_tokens) for packed, ranks in product((False, True), RANKS)]
    show("dealing", rows, store=given.store, keys=2)


if __name__ == "__main__":
    main()
