"""The bootstrap, by hand and by its properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.evaluation import statistics
from agent_r1.evaluation.statistics import (
    difference_over_seeds,
    interval,
    interval_over_seeds,
    paired_difference,
)

VALUES = st.lists(st.floats(-10, 10), min_size=1, max_size=30)


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


@settings(max_examples=40, deadline=None)
@given(values=VALUES, seed=st.integers(0, 1000))
def test_repeats_and_stays_within_the_values(values: list[float], seed: int) -> None:
    found = interval(values, 100, seed)
    assert found == interval(values, 100, seed)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert math.isclose(found.mean, sum(values) / len(values), abs_tol=1e-9)


def test_another_seed_draws_other_questions() -> None:
    values = np.arange(50.0)
    assert interval(values, 100, seed=0) != interval(values, 100, seed=1)


def test_blocks_do_not_change_how_many_samples_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    # 3 rows of 10 draws at a time for 100 samples: the last block holds one row.
    monkeypatch.setattr(statistics, "BLOCK_DRAWS", 30)
    assert statistics._resampled_means(np.arange(10.0), 100, seed=0).shape == (100,)


def test_seeds_that_disagree_widen_the_interval() -> None:
    # One seed right on all questions, one on none: the drawn seeds are (0, 0), (0, 1), (1, 0) or (1, 1), so the
    # means are 0, 1/2 and 1 whatever questions are drawn. Both seeds right on the first half: only the questions vary.
    apart_ = interval_over_seeds(np.array([[1.0] * 100, [0.0] * 100]), 2000, seed=0)
    alike = interval_over_seeds(np.array([[1.0] * 50 + [0.0] * 50] * 2), 2000, seed=0)
    assert (apart_.mean, apart_.low, apart_.high) == (0.5, 0.0, 1.0)
    assert (alike.low, alike.high) == (pytest.approx(0.4, abs=0.02), pytest.approx(0.6, abs=0.02))


def test_with_one_seed_the_interval_is_the_one_over_questions() -> None:
    values = np.array([1.0] * 120 + [0.0] * 280)
    both = interval_over_seeds(values[None], 4000, seed=0), interval(values, 4000, seed=0)
    assert both[0].mean == both[1].mean
    assert both[0].low == pytest.approx(both[1].low, abs=0.005)
    assert both[0].high == pytest.approx(both[1].high, abs=0.005)


def test_a_difference_over_seeds_pairs_the_questions_and_not_the_seeds() -> None:
    # Both agents get the same half of the questions right with each seed, in other orders: questions cancel.
    half = np.array([1.0] * 50 + [0.0] * 50)
    certain = difference_over_seeds(np.stack([half, half]), np.stack([half, half, half]), 500, seed=0)
    assert (certain.mean, certain.low, certain.high) == (0.0, 0.0, 0.0)
    # Seeds of 1 and 0 against a constant 0: the seeds drawn decide, and those of the other agent cannot cancel them.
    ones, zeros = np.ones(100), np.zeros(100)
    seeds = difference_over_seeds(np.stack([ones, zeros]), np.stack([ones, zeros]), 2000, seed=0)
    assert (seeds.low, seeds.high) == (-1.0, 1.0)


def test_other_questions_are_not_paired() -> None:
    with pytest.raises(ValueError, match="3 and 2 questions cannot be paired"):
        difference_over_seeds(np.zeros((2, 3)), np.zeros((2, 2)), 100, seed=0)


def test_pairing_removes_what_the_questions_share() -> None:
    # b is a with one more right answer: the paired difference is small and certain, however much the questions vary.
    a = [1.0, 0.0] * 50
    b = [1.0, 0.0] * 49 + [1.0, 1.0]
    found = paired_difference(b, a, 1000, seed=0)
    assert found.mean == pytest.approx(0.01)
    assert found.low == 0.0
    assert found.high <= 0.04
    assert not found.excludes_zero


def test_a_clear_difference_excludes_zero_in_both_directions() -> None:
    assert paired_difference([1.0] * 20, [0.0] * 20, 100, seed=0).excludes_zero
    assert paired_difference([0.0] * 20, [1.0] * 20, 100, seed=0).excludes_zero


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no values"):
        interval([], 100, seed=0)
    with pytest.raises(ValueError, match="level 95"):
        interval([1.0], 100, seed=0, level=95)
    with pytest.raises(ValueError, match="2 and 1 values cannot be paired"):
        paired_difference([1.0, 0.0], [1.0], 100, seed=0)
