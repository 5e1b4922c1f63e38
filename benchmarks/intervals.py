"""How often an interval over questions and seeds holds the truth: `python -m benchmarks.intervals`, in ten minutes.

A simulated answer is right with a chance whose logit is the sum of a question's, a seed's and their own noise. The sd
of the seeds' expected success is set, and the truth is the mean over all seeds and questions; of a single seed it is
that seed's own. Two recipes of the same kind differ by nothing: an interval of their difference that leaves out 0 is a
false positive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, stdtrit

from agent_r1.evaluation.statistics import RECIPE_SEEDS, Interval, difference_over_seeds
from benchmarks.stored import Row, options, show

QUESTIONS = 400
OF_QUESTIONS, NOISE, LEVEL = 1.5, 1.0, 0.8  # sds of logits, and a seed's usual logit
SDS = (0.02, 0.058)  # of the seeds' expected success
SEEDS = (1, 3, 5, 10)
DRAWS = 500  # of the bootstrap
LARGE = np.random.default_rng(1).normal(size=(2, 200_000))  # for expectations

Values = NDArray[np.float64]  # [S, N]
Difference = Callable[[Values, Values], Interval]


def expected(logit: Values) -> Values:
    """The expected success of seeds with these logits [S] over all questions."""
    spread = np.hypot(OF_QUESTIONS, NOISE) * LARGE[0, :20_000]
    return np.array([expit(each + spread).mean() for each in logit], dtype=np.float64)


def spread_of(sd: float) -> float:
    """The sd of the seeds' logits with which their expected success has this sd."""
    return float(brentq(lambda spread: expected(LEVEL + spread * LARGE[1, :400]).std() - sd, 1e-3, 3))


def answers(rng: np.random.Generator, logits: Values, questions: Values) -> Values:
    """Success [S, N] of seeds with these logits [S]."""
    chance: Values = expit(logits[:, None] + questions + NOISE * rng.normal(size=(len(logits), len(questions))))
    return (rng.random(chance.shape) < chance).astype(np.float64)


def over_means(a: Values, b: Values) -> Interval:
    """Welch's interval, of the seeds' means alone."""
    parts = [side.mean(axis=1).var(ddof=1) / len(side) for side in (a, b) if len(side) > 1]
    joint = sum(parts) ** 2 / max(sum(part**2 / (len(a) - 1) for part in parts), 1e-300)
    half, mean = float(stdtrit(joint, 0.975)) * sum(parts) ** 0.5 if joint else 0.0, float(a.mean() - b.mean())
    return Interval(mean=mean, low=mean - half, high=mean + half)


def pigeonhole(a: Values, b: Values, rng: np.random.Generator) -> Interval:
    """The bootstrap that draws questions and seeds (Owen, 2007)."""
    n = a.shape[1]
    questions = rng.multinomial(n, np.full(n, 1 / n), size=DRAWS)
    drawn = [
        rng.multinomial(len(side), np.full(len(side), 1 / len(side)), size=DRAWS) @ side / len(side) for side in (a, b)
    ]
    low, high = np.quantile(((drawn[0] - drawn[1]) * questions).sum(axis=1) / n, [0.025, 0.975])
    return Interval(mean=float(a.mean() - b.mean()), low=float(low), high=float(high))


def row(seeds: int, sd: float, name: str, difference: Difference, times: int) -> Row:
    """Coverage, false positives and half widths of one kind of interval."""
    rng, spread = np.random.default_rng(0), spread_of(sd)
    truth = float(expected(LEVEL + spread * LARGE[1, :4000]).mean())
    held, found, halves = 0, 0, []
    for _ in range(times):
        questions = OF_QUESTIONS * rng.normal(size=QUESTIONS)
        logits = LEVEL + spread * rng.normal(size=(2, seeds))
        a, b = (answers(rng, of, questions) for of in logits)
        mean, apart = difference(a, np.zeros((1, QUESTIONS))), difference(a, b)
        aim = truth if seeds >= RECIPE_SEEDS else float(expected(logits[0]).mean())
        held += mean.low <= aim <= mean.high
        found += apart.excludes_zero
        halves.append([(each.high - each.low) / 2 for each in (mean, apart)])
    error = 100 * float(np.sqrt(0.05 * 0.95 / times))
    of_mean, of_difference = np.mean(halves, axis=0)
    return {
        "seeds": str(seeds),
        "sd of seeds": f"{sd:.3f}",
        "interval": name,
        "holds the truth": f"{100 * held / times:.1f} %",
        "equal recipes told apart": f"{100 * found / times:.1f} %",
        "half width": f"{of_mean:.3f}",
        "of a difference": f"{of_difference:.3f}",
        "simulation's error": f"{error:.1f} %",
    }


def main() -> None:
    parser = options("Simulates how often intervals over seeds hold the truth.")
    parser.add_argument("--times", type=int, default=2000, help="simulated comparisons of each kind; 2000 by default")
    chosen = parser.parse_args()
    kinds: dict[str, Difference] = {
        "ours": partial(difference_over_seeds, samples=DRAWS, seed=0),
        "Welch's, of the seeds' means": over_means,
        "bootstrap of both": partial(pigeonhole, rng=np.random.default_rng(2)),
    }
    rows = [
        row(seeds, sd, name, difference, chosen.times)
        for sd in SDS
        for seeds in SEEDS
        for name, difference in kinds.items()
        if seeds >= RECIPE_SEEDS or name == "ours"
    ]
    show("intervals", rows, store=chosen.store, keys=3)


if __name__ == "__main__":
    main()
