"""The proof that the sampler runs the learner's weights (law 6)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agent_r1.params import CanaryTolerance


class StaleWeightsError(RuntimeError):
    """The sampler does not run the weights it was given."""


def accepted_gap(dtype: torch.dtype, tolerance: CanaryTolerance) -> tuple[str, float]:
    """Which gap between two models' logprobs tells under a dtype, `max` or `mean`, and the largest that passes [nats].

    In float32 it is the largest difference, and one update of the weights shows. In bfloat16 it is the mean difference,
    because the largest of many tokens is rounding alone (logits near 32 lie .125 apart); what shows is another model.
    """
    return ("max", tolerance.float32) if dtype is torch.float32 else ("mean", tolerance.bfloat16)


def prove(
    samplers: Sequence[NDArray[np.float32]],
    learners: Sequence[NDArray[np.float32]],
    *,
    dtype: torch.dtype,
    tolerance: CanaryTolerance,
) -> float:
    """The gap in nats between the logprobs that two models gave to the same tokens: the one that tells under the dtype.

    Raises:
        StaleWeightsError: the gap is above the tolerance, or not a number.
    """
    differences = np.concatenate([np.abs(one - other) for one, other in zip(samplers, learners, strict=True)])
    measure, allowed = accepted_gap(dtype, tolerance)
    gap = float(differences.max() if measure == "max" else differences.mean())  # NaN where one of them is
    if not gap <= allowed:
        how, name = ("", "float32") if measure == "max" else (" on average", "bfloat16")
        raise StaleWeightsError(
            f"after a weight transfer the sampler's logprobs are off by {gap:.2g} nats{how} "
            f"(train.update.canary_tolerance.{name} is {allowed:g}): it does not run the learner's weights"
        )
    return gap
