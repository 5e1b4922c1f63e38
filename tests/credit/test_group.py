"""Group-relative estimators, against numbers worked by hand."""

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agent_r1.credit.batch import Batch
from agent_r1.credit.estimators import ESTIMATORS as BY_NAME
from agent_r1.credit.estimators import dr_grpo, grpo, maxrl, rloo
from agent_r1.params.credit import WITH_GROUPS, CreditParams
from tests.credit.letters import batch, params

ROOT = math.sqrt(2)


def advantages(estimator: Callable[..., Any], made: Batch, chosen: CreditParams) -> np.ndarray:
    """[B] each trajectory's advantage, at its first action token."""
    estimate = estimator(made, chosen)
    assert not estimate.value_targets.any()
    assert not estimate.critic_mask.any()
    return estimate.advantages[np.arange(len(made.rewards)), made.time_steps.argmax(axis=1)]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Group 7: returns 0, 0, 0, 1, mean 1/4, sample std sqrt((3/16 + 9/16) / 3) = 1/2.
        # Group 2: returns 2, 4, mean 3, sample std sqrt(2).
        (grpo, [-1 / 2, -1 / ROOT, -1 / 2, -1 / 2, 1 / ROOT, 3 / 2]),
        (dr_grpo, [-1 / 4, -1, -1 / 4, -1 / 4, 1, 3 / 4]),
        # By the mean: -1/4 and 3/4 by 1/4; -1 and 1 by 3.
        (maxrl, [-1, -1 / 3, -1, -1, 1 / 3, 3]),
        # Against the mean of the others: 0 - 1/3 three times, 1 - 0; 2 - 4, 4 - 2.
        (rloo, [-1 / 3, -2, -1 / 3, -1 / 3, 2, 1]),
    ],
)
def test_numbers(estimator: Callable[..., Any], expected: list[float]) -> None:
    made = batch([("PAOA", [reward]) for reward in (0, 2, 0, 0, 4, 1)], groups=[7, 2, 7, 7, 2, 7])
    np.testing.assert_allclose(advantages(estimator, made, params("grpo")), expected, atol=1e-5)


def test_grpo_divides_by_the_std_plus_1e_6() -> None:
    # Returns 0 and 2e-6: deviation 1e-6, sample std sqrt(2) 1e-6, advantage 1 / (sqrt 2 + 1).
    made = batch([("PA", [0]), ("PA", [2e-6])])
    np.testing.assert_allclose(advantages(grpo, made, params("grpo")), [1 - ROOT, ROOT - 1], rtol=1e-9)


def test_maxrl_takes_no_return_below_0() -> None:
    assert not advantages(maxrl, batch([("PA", [0]), ("PA", [0])]), params("maxrl")).any()
    with pytest.raises(ValueError, match="maxrl takes returns of 0 and above, and one is -1; weigh no part below 0"):
        maxrl(batch([("PA", [2]), ("PA", [-1])]), params("maxrl"))


@pytest.mark.parametrize("name", sorted(WITH_GROUPS))
def test_a_group_of_one_gets_nothing_and_a_warning(caplog: pytest.LogCaptureFixture, name: str) -> None:
    made = batch([("PA", [3]), ("PA", [0]), ("PA", [1])], groups=[5, 6, 6])
    with caplog.at_level(logging.WARNING):
        alone, low, high = advantages(BY_NAME[name], made, params(name))
    assert alone == 0
    assert low < 0 < high
    assert "1 of 3 trajectories are alone in their group" in caplog.text
