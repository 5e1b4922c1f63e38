"""The proof that the sampler runs the learner's weights: what passes, what raises, what it is made on."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from agent_r1.rollout.canary import StaleWeightsError, prove


def logprobs(*rows: list[float]) -> list[NDArray[np.float32]]:
    return [np.array(row, np.float32) for row in rows]


def test_the_gap_is_the_largest_difference_in_either_direction() -> None:
    """Differences 0.25, 0, and -0.5: the gap is 0.5, and a tolerance of just that passes."""
    samplers, learners = logprobs([-1.0, -2.0], [-3.0]), logprobs([-1.25, -2.0], [-2.5])
    assert prove(samplers, learners, tolerance=0.5) == 0.5
    with pytest.raises(StaleWeightsError, match=r"off by 0\.5 nats .*canary_tolerance is 0\.4\d*\)"):
        prove(samplers, learners, tolerance=0.4999)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_a_number_proves_nothing(side: int, row: int, value: float) -> None:
    sides = [logprobs([-1.0, -2.0], [-3.0], [-4.0, -5.0]) for _ in range(2)]
    sides[side][row][-1] = value
    with pytest.raises(StaleWeightsError):
        prove(sides[0], sides[1], tolerance=1e-4)
