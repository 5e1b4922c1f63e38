"""The proof that the sampler runs the learner's weights: what passes, what raises, what it is made on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from agent_r1.params import CanaryTolerance
from agent_r1.rollout.canary import StaleWeightsError, prove


def logprobs(*rows: list[float]) -> list[NDArray[np.float32]]:
    return [np.array(row, np.float32) for row in rows]


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 0.5), ("bfloat16", 0.25)])
def test_the_gap_is_the_largest_difference_or_the_mean_one(dtype: str, gap: float) -> None:
    """Differences .25, 0, and -.5: the largest is .5 and the mean .25, and a tolerance of just that passes."""
    samplers, learners = logprobs([-1.0, -2.0], [-3.0]), logprobs([-1.25, -2.0], [-2.5])
    given, other = getattr(torch, dtype), {"float32": 9.0, "bfloat16": 9.0}
    assert prove(samplers, learners, dtype=given, tolerance=CanaryTolerance(**{**other, dtype: gap})) == gap
    with pytest.raises(StaleWeightsError, match=rf"off by {gap} nats.*canary_tolerance\.{dtype} is 0\.2\)"):
        prove(samplers, learners, dtype=given, tolerance=CanaryTolerance(**{**other, dtype: 0.2}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize(("side", "row"), [(0, 0), (0, 2), (1, 1)])
def test_what_is_not_a_number_proves_nothing(side: int, row: int, value: float, dtype: torch.dtype) -> None:
    sides = [logprobs([-1.0, -2.0], [-3.0], [-4.0, -5.0]) for _ in range(2)]
    sides[side][row][-1] = value
    with pytest.raises(StaleWeightsError):
        prove(sides[0], sides[1], dtype=dtype, tolerance=CanaryTolerance(float32=1e-4, bfloat16=1e-2))
