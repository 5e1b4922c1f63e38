"""Masks, recursions over sequences of different lengths, and whitening, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.credit.batch import (
    after_prompt,
    discounted_sums,
    generalized_advantages,
    select_tokens,
    whiten,
    whitened,
)
from agent_r1.credit.estimators import estimate
from agent_r1.params.credit import WITH_CRITIC, WITH_WHITENING
from agent_r1.records import Source
from tests.credit.letters import batch, params

# Prompt, prompt, role header, | action, action, observation, template, action, template. The bar ends the prompt.
SOURCE = np.array([0, 0, 3, 1, 1, 2, 3, 1, 3], dtype=np.uint8)
ACTIONS = [False, False, False, True, True, False, False, True, False]
AFTER_PROMPT = [False, False, False, True, True, True, True, True, True]


def test_after_prompt_starts_at_the_first_sampled_token() -> None:
    assert after_prompt(SOURCE).tolist() == AFTER_PROMPT


def test_after_prompt_is_empty_without_an_action() -> None:
    assert not after_prompt(np.array([0, 0, 3], dtype=np.uint8)).any()


def test_after_prompt_leaves_out_the_prompt_of_a_later_context() -> None:
    # Prompt, action, | the history again, the newest observation, template, action: only what is new counts.
    assert after_prompt(np.array([0, 1, 0, 0, 2, 3, 1], dtype=np.uint8)).tolist() == [
        *(False, True),
        *(False, False, True, True, True),
    ]


def test_a_switch_selects_actions_or_all_after_the_prompt() -> None:
    assert select_tokens(SOURCE, True).tolist() == ACTIONS
    assert select_tokens(SOURCE, False).tolist() == AFTER_PROMPT


def test_no_other_source_counts_as_action() -> None:
    every_source = np.array(list(Source), dtype=np.uint8)
    assert every_source[select_tokens(every_source, True)].tolist() == [Source.ACTION]


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
def test_every_estimator_that_whitens_has_the_floor(name: str) -> None:
    """Far above any std it is the divisor: a floor twice as high halves the advantages."""
    made = batch([("PA", [1]), ("PAOA", [2, 5])], groups=[0, 0], with_values=name in WITH_CRITIC)
    high, higher = (estimate(made, params(name, whitening_floor=floor)).advantages for floor in (100.0, 200.0))
    assert high.any()
    np.testing.assert_allclose(higher, high / 2, rtol=1e-7)


def test_tokens_between_the_time_steps_stay_at_exactly_0() -> None:
    # Counted are the zeros of the observations as well: 8, 0, 0, 4, 8 have mean 4, variance (16 + 16 + 16 + 16) / 5.
    made = batch([("PAOOAA", [])], whitening=False)
    std = np.sqrt(64 / 5)
    advantages = whitened(np.array([[0.0, 8, 0, 0, 4, 8]]), made, 0.0)
    np.testing.assert_allclose(advantages, [[0, 4 / std, 0, 0, 0, 4 / std]], atol=1e-7)
    assert not advantages[0, :1].any()
    assert not advantages[0, 2:4].any()
