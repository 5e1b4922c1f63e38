"""The proof that the sampler runs the learner's weights (law 6)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class StaleWeightsError(RuntimeError):
    """The sampler does not run the weights it was given."""


def prove(
    samplers: Sequence[NDArray[np.float32]], learners: Sequence[NDArray[np.float32]], *, tolerance: float
) -> float:
    """The largest difference in nats between the logprobs of the same tokens.

    Raises:
        StaleWeightsError: it is above the tolerance, or not a number.
    """
    differences = [np.abs(sampler - learner) for sampler, learner in zip(samplers, learners, strict=True)]
    gap = float(np.concatenate(differences).max())  # NaN where one of them is
    if not gap <= tolerance:
        raise StaleWeightsError(
            f"after a weight transfer the sampler's logprobs are off by {gap:.2g} nats (train.update.canary_tolerance "
            f"is {tolerance:g}): it does not run the learner's weights. In bfloat16 a tolerance of about 0.1 is usual"
        )
    return gap
