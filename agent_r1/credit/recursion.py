"""Recursions backwards in time, over many sequences at once.

Legend for shapes: S = sequences, N = entries of all sequences, one sequence after the other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from agent_r1.credit.batch import Floats

Lengths = NDArray[np.int64]


def generalized_advantages(rewards: Floats, values: Floats, lengths: Lengths, *, gamma: float, lam: float) -> Floats:
    """[N] A_n = delta_n + gamma lam A_{n+1}, delta_n = r_n + gamma V_{n+1} - V_n, V and A 0 after a sequence's end.

    Args:
        rewards: [N] received at each entry.
        values: [N] of the state before each entry.
        lengths: [S] entries of each sequence; 0 is allowed.

    Source: Schulman et al. 2016 (arXiv 1506.02438), Eq. 11 and 16.
    """
    next_values = np.append(values[1:], 0.0)
    next_values[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    return discounted_sums(rewards + gamma * next_values - values, lengths, gamma * lam)


def discounted_sums(entries: Floats, lengths: Lengths, factor: float) -> Floats:
    """[N] S_n = x_n + factor S_{n+1}, S 0 after a sequence's end.

    Args:
        entries: [N] the x_n.
        lengths: [S] entries of each sequence; 0 is allowed.
    """
    assert lengths.sum() == len(entries), f"{len(entries)} entries for sequences of {lengths.sum()} together"
    filled = np.arange(lengths.max(initial=0)) < lengths[:, None]  # [S, longest]
    rows = np.zeros(filled.shape)
    rows[filled] = entries
    backwards = lfilter([1.0], [1.0, -factor], rows[:, ::-1], axis=1)  # y_n = x_n + factor y_{n-1}
    sums: Floats = backwards[:, ::-1][filled]
    return sums
