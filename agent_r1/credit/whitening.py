"""Whitening: advantages of mean 0 and standard deviation 1 over the whole batch."""

from __future__ import annotations

import numpy as np

from agent_r1.credit.batch import Batch, Floats
from agent_r1.credit.masks import Mask

EPSILON = 1e-8


def whitened(advantages: Floats, batch: Batch) -> Floats:
    """[B, L] the advantages whitened over the batch's whitening mask, exactly 0 outside its time steps."""
    return np.where(batch.time_steps, whiten(advantages, batch.whitening_mask), 0.0)


def whiten(advantages: Floats, over: Mask) -> Floats:
    """[B, L] shifted and scaled so that the tokens of `over` have mean 0 and (population) std 1.

    Tokens outside `over` are shifted and scaled by the same numbers.
    """
    counted = advantages[over]
    mean, std = float(counted.mean()), float(counted.std())
    return (advantages - mean) / (std + EPSILON)
