"""How estimates agree with a truth that is known from a few draws: moments without its noise.

The truth comes as two halves, each a mean of draws of its own. Their errors are independent of each other and of the
estimates, so that products of different series have no noise, and only these are used where the truth is squared
(Spearman's correction for attenuation, 1904).

Legend for shapes: Q = questions, n = points of one question, D = series, of which the last two are the halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from agent_r1.evaluation.statistics import Interval, half_width
from agent_r1.records import Floats


class Moments(NamedTuple):
    """The sums over each question's points, from which any weighting of the questions has its covariances."""

    points: Floats  # [Q]
    sums: Floats  # [Q, D]
    products: Floats  # [Q, D, D]

    @classmethod
    def of(cls, series: Sequence[Floats]) -> Self:
        """The moments of series [n, D], one for each question."""
        products = [each.T @ each for each in series]
        return cls(*map(np.array, ([float(len(each)) for each in series], [each.sum(0) for each in series], products)))

    def covariances(self, weights: Floats) -> tuple[Floats, Floats, Floats]:
        """[D, D] over all points, over the means of questions, and over the points around those; [Q] weights."""
        points = weights @ self.points
        mean = weights @ self.sums / points
        around = self.products - self.sums[:, :, None] * self.sums[:, None, :] / self.points[:, None, None]
        every = np.tensordot(weights, self.products, 1) / points - np.outer(mean, mean)
        within = np.tensordot(weights, around, 1) / points
        return every, every - within, within


def agreements(products: Floats) -> Floats:
    """[D] from products [D, D]: each estimate with the truth, one half with the truth, and half with half.

    The last alone holds noise. Products of deviations give correlations, those of vectors cosines. NaN where the halves
    have nothing in common.
    """
    one, other = products[-2:, -2:].diagonal()
    truth = products[-1, -2]
    with np.errstate(invalid="ignore", divide="ignore"):
        estimates = products[:-2, -2:].mean(1) / np.sqrt(products.diagonal()[:-2] * truth)
        return np.append(estimates, [truth / np.sqrt((one + other) / 2 * truth), truth / np.sqrt(one * other)])


def knowledge(covariances: Sequence[Floats]) -> Floats:
    """[3, 3] for the `covariances` over all points, means and the rest: what state and critic tell of the return.

    The series are the observed return to go, the critic's value, and the halves of the true value. Of the variance of
    the return: the part that the state tells, and the part that the critic's value takes away; then the correlation of
    the critic's value with the true value. Shares of means and rest add up to those of all points.
    """
    found, variance = [], covariances[0][0, 0]
    for each in covariances:
        truth, critic, shared = each[2, 3], each[1, 1], each[1, 2:].mean()
        with np.errstate(invalid="ignore", divide="ignore"):
            correlation = shared / np.sqrt(critic * truth)
            found.append([truth / variance, (2 * shared - critic) / variance, correlation])
    return np.array(found)


def jackknife(statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]], questions: int) -> list[Interval]:
    """Each number [F] of a statistic of weights [N] of the questions, with its interval.

    Its variance is found by leaving one question out at a time, and the interval is Student's. It serves statistics
    that are no means, whose noise would be another if questions were drawn twice. A ValueError refuses one question.

    Source: Efron and Tibshirani, chapter 11.
    """
    if questions < 2:
        raise ValueError("the answers to one question have no interval over questions; take two or more")
    without = np.stack([statistic(weights) for weights in 1 - np.eye(questions)])
    with np.errstate(invalid="ignore"):  # a number that does not exist without one of the questions has no interval
        variances = (questions - 1) * without.var(axis=0)
    found = zip(statistic(np.ones(questions)), half_width(variances[:, None], [questions - 1]), strict=True)
    return [Interval(mean=float(mean), low=float(mean - half), high=float(mean + half)) for mean, half in found]
