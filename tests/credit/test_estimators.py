"""What holds for the estimators whatever the batch."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.credit.batch import Batch
from agent_r1.credit.estimators import ESTIMATORS, Estimate, estimate
from agent_r1.params.credit import STEP_LEVEL, WITH_CRITIC, WITH_GROUPS, WITH_WHITENING, CreditParams, Estimator
from tests.credit.letters import ROW, batch, params

pytestmark = pytest.mark.usefixtures("quiet")
EVERY = pytest.mark.parametrize("name", ESTIMATORS)
DRAWS = settings(max_examples=30)  # for each of the estimators, which have most of their code in common
DISCOUNTS = {"gamma": 0.9, "lam": 0.75, "step_gamma": 0.8, "step_lam": 0.5}

# The first two tell different returns apart, so that there is something to whiten.
episodes = st.lists(ROW, max_size=6).map(lambda rows: [("PA", [1]), ("PAOA", [2, 3]), *rows])
drawn_groups = st.lists(st.integers(0, 2), min_size=8, max_size=8)


def estimated(made: Batch, chosen: CreditParams) -> Estimate:
    """The estimates, with values where they are needed, of rewards without their signs where none may be below 0."""
    if chosen.estimator == "maxrl":
        made = replace(made, rewards=abs(made.rewards))
    return estimate(made if chosen.needs_critic else replace(made, values=None), chosen)


def rows_of(made: Estimate) -> np.ndarray:
    """[B, 3, L] all that is estimated."""
    return np.stack([made.advantages, made.value_targets, made.critic_mask], axis=1)


def test_the_estimators_are_those_params_can_name() -> None:
    assert set(ESTIMATORS) == set(get_args(Estimator))
    assert set(ESTIMATORS) >= STEP_LEVEL | WITH_CRITIC | WITH_GROUPS | WITH_WHITENING


@EVERY
@pytest.mark.parametrize("discount", DISCOUNTS)
def test_an_estimator_reads_the_discounts_that_are_said_of_it_and_no_others(name: str, discount: str) -> None:
    """Steps of several tokens, after which there is more to come."""
    rows = [("PAAOAA", [1, 2], [0, 1, 2, 3, 4, 5]), ("PAAAOAOA", [3, 1, 2], [0, 2, 1, 1, 2, 3, 1, 2])]
    made = batch(rows, groups=[0, 0], with_values=True)
    before, after = (estimated(made, params(name, **changes)) for changes in ({}, {discount: DISCOUNTS[discount]}))
    read = discount in params(name).read
    assert np.array_equal(rows_of(before), rows_of(after)) != read


@EVERY
@DRAWS
@given(rows=episodes, groups=drawn_groups)
def test_padding_changes_nothing(name: str, rows: list[Any], groups: list[int]) -> None:
    chosen, own = params(name, **DISCOUNTS), {"groups": groups[: len(rows)], "with_values": True}
    short, long = batch(rows, **own), batch(rows, **own, length=20)
    found = rows_of(estimated(long, chosen))
    assert np.array_equal(found[:, :, : short.steps.shape[1]], rows_of(estimated(short, chosen)))
    assert not found[:, :, short.steps.shape[1] :].any()


@EVERY
@DRAWS
@given(rows=episodes, groups=drawn_groups)
def test_advantages_at_masked_tokens_are_exactly_0(name: str, rows: list[Any], groups: list[int]) -> None:
    made = batch(rows, groups=groups[: len(rows)], with_values=True)
    found = estimated(made, params(name, **DISCOUNTS))
    assert not found.advantages[made.steps < 0].any()
    assert not found.value_targets[~found.critic_mask].any()
    assert not found.critic_mask[made.steps < 0].any()


@pytest.mark.parametrize("name", sorted(WITH_WHITENING))
@DRAWS
@given(rows=episodes, groups=drawn_groups)
def test_whitened_advantages_have_mean_0_and_std_1_over_actions(name: str, rows: list[Any], groups: list[int]) -> None:
    made = batch(rows, groups=[0, 0, *groups][: len(rows)], with_values=True)
    acting = estimated(made, params(name, **DISCOUNTS)).advantages[made.steps >= 0]
    assert acting.mean() == pytest.approx(0, abs=1e-6)
    assert acting.std() == pytest.approx(1, abs=1e-5) or acting.std() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("name", sorted(WITH_GROUPS - {"maxrl"}))  # which divides by the mean
@DRAWS
@given(rows=episodes, groups=drawn_groups, group=st.integers(0, 2), constant=st.integers(-8, 8))
def test_constant_in_group_is_free(name: str, rows: list[Any], groups: list[int], group: int, constant: int) -> None:
    rows = [row for row in rows if "A" in row[0]]
    made = batch(rows, groups=groups[: len(rows)])
    shifted = made.rewards.copy()
    for i in np.flatnonzero(made.groups == group):
        shifted[i, np.flatnonzero(made.steps[i] >= 0)[-1]] += constant
    found = estimated(replace(made, rewards=shifted), params(name))
    assert np.array_equal(found.advantages, estimated(made, params(name)).advantages)


@EVERY
def test_equal_returns_leave_nothing_to_learn(name: str) -> None:
    """Exactly nothing within groups, though the mean of three times 0.1 is not 0.1 in floating point."""
    made = batch([("PA", [0.1]), ("PAO", [0.1]), ("PPA", [0.1])], with_values=True)
    tolerance = 0 if name in WITH_GROUPS else 1e-6
    np.testing.assert_allclose(estimated(made, params(name)).advantages, 0, atol=tolerance)
