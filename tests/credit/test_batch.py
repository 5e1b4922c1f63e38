"""Masks, recursions over sequences of different lengths, and whitening, worked by hand."""

from typing import Any

import numpy as np
import pytest

from agent_r1.credit.batch import after_prompt, whiten
from agent_r1.credit.estimators import estimate
from agent_r1.params.credit import WITH_CRITIC, WITH_WHITENING
from tests.cases import cases
from tests.credit.letters import batch, params

# Prompt, prompt, role header, | action, action, observation, template, action, template. The bar ends the prompt.
SOURCE = np.array([0, 0, 3, 1, 1, 2, 3, 1, 3], dtype=np.uint8)
AFTER_PROMPT = [False, False, False, True, True, True, True, True, True]


@cases("source, after")
def test_after_prompt_starts_at_the_first_sampled_token(source: Any, after: list[bool]) -> None:
    assert after_prompt(np.array(source, np.uint8)).tolist() == after
    assert after_prompt(np.array(SOURCE, np.uint8)).tolist() == AFTER_PROMPT


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
