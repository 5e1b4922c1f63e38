"""Whitening, worked by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from agent_r1.credit.batch import Batch, whiten, whitened
from agent_r1.credit.estimators import estimate
from agent_r1.params.credit import WITH_CRITIC, WITH_WHITENING, CreditParams


def test_whitening_shifts_and_scales_everything_by_the_counted_tokens() -> None:
    # Counted: 1 and 5, mean 3, std 2. The token that is not counted, 9, becomes (9 - 3) / 2.
    advantages = np.array([[1.0, 9.0], [5.0, 3.0]])
    over = np.array([[True, False], [True, False]])
    np.testing.assert_allclose(whiten(advantages, over, 0.0), [[-1, 3], [1, 0]], atol=1e-7)


@pytest.mark.parametrize(("floor", "divisor"), [(0.0, 2.0), (1.5, 2.0), (4.0, 4.0)])
def test_a_std_below_the_floor_counts_as_the_floor(floor: float, divisor: float) -> None:
    # 1 and 5: mean 3, std 2.
    whitened_by_floor = whiten(np.array([[1.0, 5.0]]), np.array([[True, True]]), floor)
    np.testing.assert_allclose(whitened_by_floor, [[-2 / divisor, 2 / divisor]], atol=1e-7)


@pytest.mark.parametrize("name", sorted(WITH_WHITENING))
def test_every_estimator_that_whitens_has_the_floor(
    batch: Callable[..., Batch], params: Callable[..., CreditParams], name: str
) -> None:
    """Far above any std it is the divisor: a floor twice as high halves the advantages."""
    made = batch([("PA", [1]), ("PAOA", [2, 5])], groups=[0, 0], with_values=name in WITH_CRITIC)
    high, higher = (estimate(made, params(name, whitening_floor=floor)).advantages for floor in (100.0, 200.0))
    assert high.any()
    np.testing.assert_allclose(higher, high / 2, rtol=1e-7)


def test_tokens_between_the_time_steps_stay_at_exactly_0(batch: Callable[..., Batch]) -> None:
    # Counted are the zeros of the observations as well: 8, 0, 0, 4, 8 have mean 4, variance (16 + 16 + 16 + 16) / 5.
    made = batch([("PAOOAA", [])], whitening=False)
    std = np.sqrt(64 / 5)
    advantages = whitened(np.array([[0.0, 8, 0, 0, 4, 8]]), made, 0.0)
    np.testing.assert_allclose(advantages, [[0, 4 / std, 0, 0, 0, 4 / std]], atol=1e-7)
    assert not advantages[0, :1].any()
    assert not advantages[0, 2:4].any()
