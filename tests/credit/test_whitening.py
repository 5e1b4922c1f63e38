"""Whitening, worked by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agent_r1.credit.batch import Batch
from agent_r1.credit.estimators import whiten, whitened


def test_whitening_shifts_and_scales_everything_by_the_counted_tokens() -> None:
    # Counted: 1 and 5, mean 3, std 2. The token that is not counted, 9, becomes (9 - 3) / 2.
    advantages = np.array([[1.0, 9.0], [5.0, 3.0]])
    over = np.array([[True, False], [True, False]])
    np.testing.assert_allclose(whiten(advantages, over), [[-1, 3], [1, 0]], atol=1e-7)


def test_tokens_between_the_time_steps_stay_at_exactly_0(batch: Callable[..., Batch]) -> None:
    # Counted are the zeros of the observations as well: 8, 0, 0, 4, 8 have mean 4, variance (16 + 16 + 16 + 16) / 5.
    made = batch([("PAOOAA", [])], whitening=False)
    std = np.sqrt(64 / 5)
    advantages = whitened(np.array([[0.0, 8, 0, 0, 4, 8]]), made)
    np.testing.assert_allclose(advantages, [[0, 4 / std, 0, 0, 0, 4 / std]], atol=1e-7)
    assert not advantages[0, :1].any()
    assert not advantages[0, 2:4].any()
