"""Confidence intervals of means over questions and seeds, by the percentile bootstrap.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. N = questions, S = seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_DRAWS = 1 << 22  # question draws held in memory at a time
LEVEL = 0.95  # both tails together

Values = Sequence[float] | NDArray[np.float64]  # [N]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.low > 0 or self.high < 0


def interval(values: Values, samples: int, seed: int, level: float = LEVEL) -> Interval:
    """The mean of `values` [N] with the interval that holds `level` of `samples` resampled means.

    Questions are drawn with replacement by the seed. Raises ValueError for no values or a level outside (0, 1).
    """
    if len(values) == 0:
        raise ValueError("no values to average: the set of questions is empty")
    if not 0 < level < 1:
        raise ValueError(f"level {level} is not a share between 0 and 1; {LEVEL} is usual")
    observed = np.asarray(values, dtype=np.float64)
    return _percentiles(float(observed.mean()), _resampled_means(observed, samples, seed), level)


def paired_difference(a: Values, b: Values, samples: int, seed: int, level: float = LEVEL) -> Interval:
    """The mean of `a - b` [N] with its interval; both are of the same questions in the same order.

    Raises ValueError if their lengths differ.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values cannot be paired: measure both on the same questions")
    return interval(np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64), samples, seed, level)


def interval_over_seeds(values: NDArray[np.float64], samples: int, seed: int) -> Interval:
    """The mean of `values` [S, N] with its interval; questions and seeds are both drawn with replacement.

    All seeds answered the same questions, so a drawn question counts with all its answers (Owen, The pigeonhole
    bootstrap, 2007). With one seed this is the interval over questions.
    """
    rng, n = np.random.default_rng(seed), values.shape[1]
    means = _weighted_means(values, rng.multinomial(n, np.full(n, 1 / n), size=samples), rng)
    return _percentiles(float(values.mean()), means, LEVEL)


def difference_over_seeds(a: NDArray[np.float64], b: NDArray[np.float64], samples: int, seed: int) -> Interval:
    """The mean of `a` [S, N] minus that of `b` [S', N] on the same questions, with its interval.

    A drawn question counts for both. The seeds of each are drawn separately, because trainings are independent.
    Raises ValueError if the numbers of questions differ.
    """
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"{a.shape[1]} and {b.shape[1]} questions cannot be paired: measure both on the same ones")
    rng, n = np.random.default_rng(seed), a.shape[1]
    questions = rng.multinomial(n, np.full(n, 1 / n), size=samples)
    means = _weighted_means(a, questions, rng) - _weighted_means(b, questions, rng)
    return _percentiles(float(a.mean() - b.mean()), means, LEVEL)


def _resampled_means(values: NDArray[np.float64], samples: int, seed: int) -> NDArray[np.float64]:
    """[samples] means, each of N draws with replacement."""
    rng, n = np.random.default_rng(seed), len(values)
    rows = max(1, BLOCK_DRAWS // n)
    blocks = [min(rows, samples - start) for start in range(0, samples, rows)]
    return np.concatenate([values[rng.integers(n, size=(block, n))].mean(axis=1) for block in blocks])


def _weighted_means(
    values: NDArray[np.float64], questions: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """[samples] means of values [S, N], weighted by the draws of questions [samples, N] and of seeds."""
    s, n = values.shape
    seeds = rng.multinomial(s, np.full(s, 1 / s), size=len(questions))
    return np.asarray(((seeds @ values) * questions).sum(axis=1) / (s * n), dtype=np.float64)


def _percentiles(mean: float, resampled: NDArray[np.float64], level: float) -> Interval:
    tail = (1 - level) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(mean=mean, low=float(low), high=float(high))
