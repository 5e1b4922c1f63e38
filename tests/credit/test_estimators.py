"""Estimators against numbers worked by hand, and properties that hold for any batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.credit.estimators import ESTIMATORS, Batch, generalized_advantages, group_advantages, grpo, whiten
from agent_r1.params import CreditParams

# One trajectory: prompt, two action tokens, two observation tokens, one action token.
ACTIONS = np.array([[False, True, True, False, False, True]])
AFTER_PROMPT = np.array([[False, True, True, True, True, True]])
REWARDS = np.array([[0.0, 0.0, 1.0, 0.0, 0.0, 2.0]])
VALUES = np.array([[9.0, 0.5, 1.0, 2.0, -1.0, 0.5]])  # the prompt's 9 must not matter


def test_gae_over_action_tokens() -> None:
    # gamma = 1/2, gamma lambda = 1/4, time steps t1, t2, t5:
    #   t5: delta = 2 + 0 - 1/2 = 3/2            A = 3/2
    #   t2: delta = 1 + 1/2 * 1/2 - 1 = 1/4      A = 1/4 + 1/4 * 3/2 = 5/8
    #   t1: delta = 0 + 1/2 * 1 - 1/2 = 0        A = 1/4 * 5/8 = 5/32
    advantages = generalized_advantages(REWARDS, VALUES, ACTIONS, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0, 5 / 32, 5 / 8, 0, 0, 3 / 2]]


def test_gae_over_all_tokens_after_the_prompt() -> None:
    #   t5: delta = 2 + 0 - 1/2 = 3/2            A = 3/2
    #   t4: delta = 1/2 * 1/2 + 1 = 5/4          A = 5/4 + 1/4 * 3/2 = 13/8
    #   t3: delta = -1/2 - 2 = -5/2              A = -5/2 + 1/4 * 13/8 = -67/32
    #   t2: delta = 1 + 1/2 * 2 - 1 = 1          A = 1 - 1/4 * 67/32 = 61/128
    #   t1: delta = 1/2 * 1 - 1/2 = 0            A = 1/4 * 61/128 = 61/512
    advantages = generalized_advantages(REWARDS, VALUES, AFTER_PROMPT, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0, 61 / 512, 61 / 128, -67 / 32, 13 / 8, 3 / 2]]


def test_whitening_shifts_and_scales_everything_by_the_counted_tokens() -> None:
    # Counted: 1 and 5, mean 3, std 2. The token that is not counted, 9, becomes (9 - 3) / 2.
    advantages = np.array([[1.0, 9.0], [5.0, 3.0]])
    over = np.array([[True, False], [True, False]])
    np.testing.assert_allclose(whiten(advantages, over), [[-1, 3], [1, 0]], atol=1e-7)


def test_grpo_numbers() -> None:
    # Group 7: returns 0, 0, 0, 1, mean 1/4, sample std sqrt((3/16 + 9/16) / 3) = 1/2: -1/2 three times, 3/2.
    # Group 2: returns 2, 4, mean 3, sample std sqrt(2): -1/sqrt 2, 1/sqrt 2.
    returns = np.array([0.0, 2.0, 0.0, 0.0, 4.0, 1.0])
    groups = np.array([7, 2, 7, 7, 2, 7])
    root = 1 / math.sqrt(2)
    np.testing.assert_allclose(group_advantages(returns, groups), [-0.5, -root, -0.5, -0.5, root, 1.5], atol=1e-5)


def test_grpo_divides_by_the_std_plus_1e_6() -> None:
    # Returns 0 and 2e-6: deviation 1e-6, sample std sqrt(2) 1e-6, advantage 1 / (sqrt 2 + 1).
    advantages = group_advantages(np.array([0.0, 2e-6]), np.array([0, 0]))
    np.testing.assert_allclose(advantages, [1 - math.sqrt(2), math.sqrt(2) - 1], rtol=1e-9)


def test_grpo_gives_a_group_of_one_nothing_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        advantages = group_advantages(np.array([3.0, 0.0, 1.0]), np.array([5, 6, 6]))
    assert advantages[0] == 0
    assert advantages[1] < 0 < advantages[2]
    assert "1 of 3 trajectories are alone" in caplog.text


def test_grpo_gives_equal_rewards_exactly_nothing() -> None:
    # The mean of three times 0.1 is not 0.1 in floating point.
    assert not group_advantages(np.full(3, 0.1), np.zeros(3, dtype=np.int64)).any()


@pytest.mark.parametrize("time_steps", [ACTIONS, AFTER_PROMPT], ids=["recursion on", "recursion off"])
def test_grpo_broadcasts_over_the_time_steps(time_steps: np.ndarray, params: Callable[..., CreditParams]) -> None:
    # Two copies of the trajectory, returns 3 and 0: deviations 3/2 and -3/2, sample std 3/sqrt 2.
    batch = Batch(
        rewards=np.concatenate([REWARDS, 0 * REWARDS]),
        values=None,
        time_steps=np.repeat(time_steps, 2, axis=0),
        whitening_mask=np.repeat(ACTIONS, 2, axis=0),
        critic_mask=np.zeros((2, 6), dtype=bool),
        groups=np.array([0, 0]),
    )
    expected = np.where(time_steps, 1 / math.sqrt(2), 0)
    np.testing.assert_allclose(grpo(batch, params("grpo")).advantages, np.concatenate([expected, -expected]), atol=1e-5)


# Properties. Eighths add and multiply exactly, so equality can be exact.
eighths = st.integers(-16, 16).map(lambda n: n / 8)
token = st.tuples(st.booleans(), eighths, eighths)  # is an action, reward, value
tokens = st.lists(token, min_size=1, max_size=12)


def arrays(rows: list[list[tuple[bool, float, float]]], length: int = 12) -> tuple[np.ndarray, ...]:
    """Actions, rewards (on action tokens only) and values, each [B, length]."""
    actions, rewards, values = np.zeros((len(rows), length), bool), *np.zeros((2, len(rows), length))
    for i, row in enumerate(rows):
        for j, (action, reward, value) in enumerate(row):
            actions[i, j], rewards[i, j], values[i, j] = action, action * reward, value
    return actions, rewards, values


@given(tokens)
def test_gae_at_gamma_and_lambda_1_is_the_same_on_actions_with_and_without_observations(
    row: list[tuple[bool, float, float]],
) -> None:
    # The deltas telescope: A_n is the return to go minus V_n, whatever stands in between.
    actions, rewards, values = arrays([row])
    after_prompt = np.logical_or.accumulate(actions, axis=1)
    masked = generalized_advantages(rewards, values, actions, gamma=1, lam=1)
    unmasked = generalized_advantages(rewards, values, after_prompt, gamma=1, lam=1)
    assert np.array_equal(masked[actions], unmasked[actions])


@given(tokens, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_deltas(row: list[tuple[bool, float, float]], gamma: float, lam: float) -> None:
    actions, rewards, values = arrays([row])
    reward, value = rewards[actions], np.append(values[actions], 0)
    deltas = reward + gamma * value[1:] - value[:-1]
    expected = [sum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[n:])) for n in range(len(deltas))]
    advantages = generalized_advantages(rewards, values, actions, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages[actions], expected, atol=1e-12)
    assert not advantages[~actions].any()


@given(tokens, tokens, st.integers(12, 20))
def test_raw_gae_ignores_padding_and_other_trajectories(
    row: list[tuple[bool, float, float]], other: list[tuple[bool, float, float]], length: int
) -> None:
    actions, rewards, values = arrays([row])
    alone = generalized_advantages(rewards, values, actions, gamma=0.9, lam=0.7)
    actions, rewards, values = arrays([other, row], length)
    together = generalized_advantages(rewards, values, actions, gamma=0.9, lam=0.7)
    assert np.array_equal(together[1, :12], alone[0])
    assert not together[:, 12:].any()


members = st.lists(st.tuples(st.integers(0, 3), eighths), min_size=2, max_size=16)  # group, return


@given(members, st.integers(0, 3), st.integers(-8, 8))
def test_grpo_ignores_a_constant_added_to_a_group(rows: list[tuple[int, float]], group: int, constant: int) -> None:
    groups, returns = np.array([g for g, _ in rows]), np.array([r for _, r in rows])
    shifted = returns + constant * (groups == group)
    assert np.array_equal(group_advantages(shifted, groups), group_advantages(returns, groups))


@given(members)
def test_grpo_sums_to_nothing_within_every_group(rows: list[tuple[int, float]]) -> None:
    groups, returns = np.array([g for g, _ in rows]), np.array([r for _, r in rows])
    advantages = group_advantages(returns, groups)
    for group in set(groups):
        assert abs(advantages[groups == group].sum()) < 1e-9


def test_reward_outside_the_time_steps_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="would be lost"):
        generalized_advantages(np.ones((1, 6)), VALUES, ACTIONS, gamma=1, lam=1)


def test_estimators_are_those_params_can_name() -> None:
    assert set(ESTIMATORS) == set(get_args(CreditParams.model_fields["estimator"].annotation))
