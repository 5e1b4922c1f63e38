"""Masks, recursions over sequences of different lengths, and whitening, worked by hand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from agent_r1.credit.batch import after_prompt, whiten
from agent_r1.credit.estimators import estimate
from agent_r1.params.credit import WITH_CRITIC, WITH_WHITENING
from tests.credit.letters import batch, params

# Prompt, prompt, role header, | action, action, observation, template, action, template. The bar ends the prompt.
SOURCE = np.array([0, 0, 3, 1, 1, 2, 3, 1, 3], dtype=np.uint8)
ACTIONS = [False, False, False, True, True, False, False, True, False]
AFTER_PROMPT = [False, False, False, True, True, True, True, True, True]


@pytest.mark.parametrize(
    ("source", "after"),
    [
        (SOURCE, AFTER_PROMPT),
        ([0, 0, 3], [False] * 3),  # no action
        # Prompt, action, | the history again, the newest observation, template, action: only what is new counts.
        ([0, 1, 0, 0, 2, 3, 1], [False, True, False, False, True, True, True]),
    ],
)
def test_after_prompt_starts_at_the_first_sampled_token(source: Any, after: list[bool]) -> None:
    assert after_prompt(np.array(source, np.uint8)).tolist() == after


sequences = st.lists(st.lists(st.tuples(st.floats(-4, 4), st.floats(-4, 4)), max_size=9), min_size=1, max_size=6)
share = st.floats(0, 1)


@pytest.mark.parametrize(("floor", "divisor"), [(0.0, 2.0), (1.5, 2.0), (4.0, 4.0)])
def test_whitening_shifts_and_scales_everything_by_the_counted_tokens(floor: float, divisor: float) -> None:
    # Counted: 1 and 5, mean 3, std 2, or the floor if that is more. The token that is not counted, 9, is scaled too.
    over = np.array([[True, False], [True, False]])
    found = whiten(np.array([[1.0, 9.0], [5.0, 3.0]]), over, floor)
    np.testing.assert_allclose(found, np.array([[-2, 6], [2, 0]]) / divisor, atol=1e-7)


@pytest.mark.parametrize("name", sorted(WITH_WHITENING))
def test_every_estimator_that_whitens_has_the_floor(name: str) -> None:
    """Far above any std it is the divisor: a floor twice as high halves the advantages."""
    made = batch([("PA", [1]), ("PAOA", [2, 5])], groups=[0, 0], with_values=name in WITH_CRITIC)
    high, higher = (estimate(made, params(name, whitening_floor=floor)).advantages for floor in (100.0, 200.0))
    assert high.any()
    np.testing.assert_allclose(higher, high / 2, rtol=1e-7)
