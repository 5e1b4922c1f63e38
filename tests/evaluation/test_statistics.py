"""The bootstrap, by hand and by its properties."""

import math
from functools import partial

import numpy as np
import pytest
from scipy import stats

from agent_r1.evaluation.statistics import (
    Variances,
    difference_over_seeds,
    foretold,
    interval,
    interval_over_seeds,
    paired_difference,
    prediction,
    variances,
)
from benchmarks import intervals


def test_two_values_by_hand() -> None:
    # The resampled means of (0, 1) are 0, 1/2, 1 with chances 1/4, 1/2, 1/4: the middle 95 % reach from 0 to 1, and the
    # middle 40 % (quantiles .3 and .7) are all 1/2.
    wide, narrow = interval([0, 1], 4000, seed=0), interval([0, 1], 4000, seed=0, level=0.4)
    assert (wide.mean, wide.low, wide.high) == (0.5, 0.0, 1.0)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_agrees_with_the_normal_interval_where_that_holds() -> None:
    # 400 answers, 30 % right: 0.3 -+ 1.96 sqrt(0.3 * 0.7 / 400) = 0.3 -+ 0.0449.
    found = interval([1.0] * 120 + [0.0] * 280, 4000, seed=1)
    assert found.low == pytest.approx(0.2551, abs=0.005)
    assert found.high == pytest.approx(0.3449, abs=0.005)


@pytest.mark.parametrize("count", [1, 2, 50, 400])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_of_equal_answers_the_interval_is_the_exact_one(count: int, level: float) -> None:
    for right in (0, count):
        exact = stats.binomtest(right, count).proportion_ci(level, method="exact")
        found = interval([float(right == count)] * count, 100, 0, level)
        assert (found.low, found.high) == pytest.approx((exact.low, exact.high))


def test_equal_values_by_hand() -> None:
    # .025^(1/2) = .158: of all questions up to .842 may have another value, here from 0 to 1.
    found = interval([0.25, 0.25], 100, seed=0)
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25 * 0.1581, 0.25 + 0.75 * 0.8419), abs=1e-4)
    # Equal differences may be -1 and 1 elsewhere; counts may be anything, of which nothing is said.
    equal = paired_difference([1.0, 0.0], [1.0, 0.0], 100, seed=0)
    assert (equal.low, equal.high) == pytest.approx((-0.8419, 0.8419), abs=1e-4)
    counts = interval([2.0, 2.0], 100, seed=0, within=None)
    assert (counts.low, counts.high) == (2.0, 2.0)


THREE_SEEDS = np.array([[1.0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])


def test_two_way_effects_by_hand() -> None:
    # The seeds' means .75, .5, .25 vary by 1/16: their part is 1/48. By question the differences from (1, 1, 0, 0) are
    # 0, -1/3, 1/3, 0, which vary by 2/27: by 4 questions 1/54. What neither seeds nor questions explain has the mean
    # square 5/36, by 12 answers 5/432, which is in both parts. 1/48 + 1/54 - 5/432 = 1/36: the standard error is 1/6.
    # Satterthwaite: (1/36)^2 / ((1/48)^2 / 2 + (1/144)^2 / 3) = 3.310 degrees of freedom.
    found = difference_over_seeds(THREE_SEEDS, np.array([[1.0, 1, 0, 0]]), 100, seed=0)
    assert found.mean == pytest.approx(0)
    assert found.high == pytest.approx(stats.t(3.3103).ppf(0.975) / 6, rel=1e-4)
    assert found.low == pytest.approx(-found.high)
    within = interval_over_seeds(THREE_SEEDS, 100, seed=0)  # the possible values: 0.5 +- 2.57 * 0.236 else
    assert (within.mean, within.low, within.high) == (0.5, 0.0, 1.0)


def test_seeds_that_disagree_widen_the_interval_from_three_on() -> None:
    # Of two seeds nothing is known about others: the interval is of these two policies, over questions.
    ones, zeros = np.ones(100), np.zeros(100)
    two, three = (interval_over_seeds(np.stack(seeds), 500, 0) for seeds in ([ones, zeros], [ones, zeros, ones]))
    assert two == interval([0.5] * 100, 500, 0)
    assert (three.low, three.high) == (0.0, 1.0)


def test_with_one_seed_the_interval_is_the_one_over_questions() -> None:
    values = np.array([1.0] * 120 + [0.0] * 280)
    both = interval_over_seeds(values[None], 4000, seed=0), interval(values, 4000, seed=0)
    assert both[0].mean == both[1].mean
    assert both[0].low == pytest.approx(both[1].low, abs=0.005)
    assert both[0].high == pytest.approx(both[1].high, abs=0.005)


def test_a_difference_over_seeds_pairs_the_questions_and_not_the_seeds() -> None:
    # Both agents get the same half of the questions right with each seed: questions cancel.
    half = np.array([1.0] * 50 + [0.0] * 50)
    equal = difference_over_seeds(np.stack([half] * 4), np.stack([half] * 3), 500, seed=0)
    assert equal == paired_difference(half, half, 500, seed=0)
    # The same seeds in the same order: they do not cancel, since trainings are independent.
    same = difference_over_seeds(THREE_SEEDS, THREE_SEEDS, 500, seed=0)
    assert same.high == pytest.approx(stats.t(4).ppf(0.975) * math.sqrt(1 / 24), rel=1e-6)
    assert same.low == -same.high


@pytest.mark.parametrize("seeds", [3, 10])
def test_an_interval_over_seeds_holds_the_truth_and_equal_recipes_are_rarely_told_apart(seeds: int) -> None:
    # 400 simulations whose error is 1.1 points: coverage above 89 %, false positives below 8 %.
    found = intervals.row(seeds, 0.058, "ours", partial(difference_over_seeds, samples=100, seed=0), times=400)
    assert float(found["holds the truth"].split()[0]) > 89
    assert float(found["equal recipes told apart"].split()[0]) < 8


def test_variances_by_hand() -> None:
    # Of THREE_SEEDS means vary by 1/16 and the rest by 5/36: the seeds' own part is 1/16 - 5/36/4. By question its
    # means 1, 2/3, 1/3, 0 vary by 5/27, of which the rest makes 5/36/3. Two equal recipes differ by less than chance.
    found = variances([THREE_SEEDS, THREE_SEEDS], samples=1)
    assert found == pytest.approx(Variances(1 / 36, 4, 5 / 36, 0, 5 / 36, 0))


def test_a_half_width_of_fixed_policies_by_hand() -> None:
    # .1 / 50 for the questions and twice (.3 + .4 / 2) / (2 * 50) for the noise: .012.
    found = foretold(Variances(9, 4, 0.2, 0.1, 0.3, 0.4), seeds=2, questions=50, samples=2, recipes=2)
    assert found.low == found.mean == found.high == pytest.approx(stats.t(49).ppf(0.975) * math.sqrt(0.012))


def test_a_half_width_of_seeds_is_what_chi_square_makes_of_students_interval() -> None:
    # Of two seeds' degrees of freedom alone: t(2) sqrt(V), whose mean is sqrt(pi) / 2 of it. The range is that of
    # F(2, 1000), .051 to 3.0: the evidence is all but certain.
    found = foretold(Variances(0.03, 1000, 0, 0, 0, 0), seeds=3, questions=50, samples=1, recipes=1)
    whole = stats.t(2).ppf(0.975) * 0.1
    assert found.mean == pytest.approx(whole * math.sqrt(math.pi) / 2, rel=0.02)
    assert [found.low, found.high] == pytest.approx(whole * np.sqrt(stats.f(2, 1000).ppf([0.05, 0.95])), rel=0.05)


@pytest.mark.parametrize("shapes", [[(3, 4)], [(1, 4), (1, 4)], [(3, 1), (3, 1)], []])
def test_too_little_to_vary_is_refused(shapes: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"\(seeds, questions\) by run, and two of each can vary"):
        variances([np.ones(shape) for shape in shapes], samples=1)


def test_a_clear_difference_excludes_zero_in_both_directions() -> None:
    assert paired_difference([1.0] * 20, [0.0] * 20, 100, seed=0).excludes_zero
    assert paired_difference([0.0] * 20, [1.0] * 20, 100, seed=0).excludes_zero
    # As the sign test has it: five of five, .0625 on both sides, may be chance, and six of six not.
    assert [paired_difference([1.0] * n, [0.0] * n, 100, 0).excludes_zero for n in (1, 5, 6)] == [False, False, True]


def test_the_interval_of_a_further_seed_by_hand() -> None:
    """Seeds .1 apart have a variance of .01: a further one's is .01 * 4/3, and of three iterations it has 6 degrees.

    Student's quantile is 2.447: .5 -+ 2.447 * .11547. Then an iteration without a variance: two thirds, 4 degrees.
    """
    low, mean, high = prediction(np.array([[0.4] * 4, [0.5] * 4, [0.6] * 4]))
    assert mean.tolist() == pytest.approx([0.5] * 4)
    assert (low[1], high[1]) == pytest.approx((0.5 - 0.28255, 0.5 + 0.28255), abs=1e-4)
    low, mean, high = prediction(np.array([[0.4, 0.4, 0.5], [0.5] * 3, [0.6, 0.6, 0.5]]))
    assert high[1] - mean[1] == pytest.approx(2.7764 * (0.01 * 4 / 3 * 2 / 3) ** 0.5, abs=1e-4)
    with pytest.raises(ValueError, match="2 seeds say nothing about another one; take 3 or more"):
        prediction(np.zeros((2, 4)))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no values"):
        interval([], 100, seed=0)
    with pytest.raises(ValueError, match="level 95"):
        interval([1.0], 100, seed=0, level=95)
    with pytest.raises(ValueError, match="2 and 1 values cannot be paired"):
        paired_difference([1.0, 0.0], [1.0], 100, seed=0)
