"""Recursions over sequences of different lengths, against sums written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.credit.batch import discounted_sums, generalized_advantages

sequences = st.lists(st.lists(st.tuples(st.floats(-4, 4), st.floats(-4, 4)), max_size=9), min_size=1, max_size=6)
share = st.floats(0, 1)


def test_discounted_sums() -> None:
    # Two entries, none, three: 1 + 4/2, 4 | | 8 + (2 + 6/2)/2, 2 + 6/2, 6.
    sums = discounted_sums(np.array([1.0, 4, 8, 2, 6]), np.array([2, 0, 3]), 0.5)
    assert sums.tolist() == [3, 4, 10.5, 5, 6]


def test_generalized_advantages() -> None:
    # gamma = 1/2, gamma lambda = 1/4. First sequence: 2 - 1/2 = 3/2; 1 + 1/2 * 1/2 - 1 + 1/4 * 3/2 = 5/8.
    # The second knows nothing of it: 3 - 1.
    advantages = generalized_advantages(
        np.array([1.0, 2, 3]), np.array([1, 0.5, 1]), np.array([2, 1]), gamma=0.5, lam=0.5
    )
    assert advantages.tolist() == [5 / 8, 3 / 2, 2]


@given(sequences, share, share)
def test_generalized_advantages_are_discounted_sums_of_deltas(
    drawn: list[list[tuple[float, float]]], gamma: float, lam: float
) -> None:
    expected = []
    for sequence in drawn:
        values = [value for _, value in sequence] + [0]
        deltas = [reward + gamma * values[n + 1] - values[n] for n, (reward, _) in enumerate(sequence)]
        expected += [sum((gamma * lam) ** j * d for j, d in enumerate(deltas[n:])) for n in range(len(deltas))]
    flat = np.array([entry for sequence in drawn for entry in sequence]).reshape(-1, 2)
    lengths = np.array([len(sequence) for sequence in drawn])
    advantages = generalized_advantages(flat[:, 0], flat[:, 1], lengths, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages, expected, atol=1e-12)


def test_nothing_has_no_sums() -> None:
    assert discounted_sums(np.zeros(0), np.array([0, 0]), 0.5).tolist() == []


def test_lengths_that_do_not_add_up_are_a_bug() -> None:
    with pytest.raises(RuntimeError, match="3 entries for sequences of 4"):
        discounted_sums(np.zeros(3), np.array([2, 2]), 0.5)
