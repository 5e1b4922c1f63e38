"""How often a recipe's band turns away a good seed, and shows a bad one: `python -m benchmarks.bands`, in a minute.

A simulated seed's success rises from .22 to .58 in 18 iterations of 128 episodes. Seeds differ by what they gain, or by
a level, with the sd that is set at the end. A bad seed gains a quarter of it.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from agent_r1.evaluation.statistics import prediction
from agent_r1.inspection.recipes import STREAK
from benchmarks.stored import Row, options, show

ITERATIONS, EPISODES, START, GAIN, BAD = 18, 128, 0.22, 0.36, 0.25
TIME = np.linspace(0, 1, ITERATIONS)
SHAPES = {"noise alone": (0.0, TIME), "gain": (0.06, TIME), "level": (0.06, np.ones(ITERATIONS))}
EXTREME = {"level, far apart": (0.15, np.ones(ITERATIONS))}


def outside(values: NDArray[np.float64], band: NDArray[np.float64], streak: int) -> bool:
    """Whether values are on one side of a band in so many iterations in a row."""
    sides = [values > band[2], values < band[0]]
    windows = [np.lib.stride_tricks.sliding_window_view(side, streak).all(axis=1).any() for side in sides]
    return bool(np.any(windows))


def row(seeds: int, name: str, sd: float, shape: NDArray[np.float64], times: int) -> Row:
    """The shares of good and bad seeds that leave the band."""
    rng = np.random.default_rng(0)
    single, once, left, shown = [], [], [], []
    for _ in range(times):
        offsets = sd * rng.normal(size=(seeds + 1, 1)) * shape
        gains = np.repeat(GAIN, seeds + 2)
        gains[-1] = BAD * GAIN
        chances = START + gains[:, None] * TIME + np.vstack([offsets, offsets[-1:]])
        values = rng.binomial(EPISODES, chances.clip(0.01, 0.99)) / EPISODES
        band, (good, bad) = prediction(values[:seeds]), values[seeds:]
        single.append(((good > band[2]) | (good < band[0])).mean())
        once.append(outside(good, band, 1))
        left.append(outside(good, band, STREAK))
        shown.append(outside(bad, band, STREAK))
    return {
        "seeds": str(seeds),
        "seeds differ by": name,
        "sd": f"{sd:.2f}",
        "outside, of iterations": f"{100 * np.mean(single):.1f} %",
        "good seeds ever outside": f"{100 * np.mean(once):.0f} %",
        "good seeds that leave": f"{100 * np.mean(left):.1f} %",
        "bad seeds that leave": f"{100 * np.mean(shown):.0f} %",
    }


def main() -> None:
    parser = options("Simulates how often a band turns a good seed away.")
    parser.add_argument("--times", type=int, default=4000, help="simulated bands of each kind")
    chosen = parser.parse_args()
    kinds = (SHAPES | EXTREME).items()
    rows = [row(seeds, name, *kind, chosen.times) for (name, kind), seeds in product(kinds, (3, 5))]
    show("bands", rows, store=chosen.store, keys=3)


if __name__ == "__main__":
    main()
