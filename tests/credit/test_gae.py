"""GAE over tokens, over steps and over both, against numbers worked by hand."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.credit.estimators import ESTIMATORS, bi_level_gae, step_gae
from agent_r1.params.credit import CreditParams
from tests.cases import cases
from tests.credit.letters import ROW, batch, params

VALUES = np.array([[9.0, 0.5, 1.0, 2.0, -1.0, 0.5]])  # the prompt's 9 must not matter
EPISODE = ("PAAOOA", [1, 2], VALUES[0])


def test_step_gae() -> None:
    # Values at first tokens, 1/2 and 1/2. gamma = 1/2, gamma lambda = 1/4, per step:
    #   step 2: delta = 2 + 0 - 1/2 = 3/2              A = 3/2                     target 2
    #   step 1: delta = 1 + 1/2 * 1/2 - 1/2 = 3/4      A = 3/4 + 1/4 * 3/2 = 9/8   target 13/8
    # Tokens 9/8, 9/8, 12/8: mean 10/8, variance (1/64 + 1/64 + 4/64) / 3 = 1/32.
    estimate = step_gae(batch([EPISODE], with_values=True), params("step_gae", step_gamma=0.5, step_lam=0.5))
    root = math.sqrt(2)
    np.testing.assert_allclose(estimate.advantages, [[0, -root / 2, -root / 2, 0, 0, root]], atol=1e-6)
    assert estimate.value_targets.tolist() == [[0, 13 / 8, 0, 0, 0, 2]]
    assert estimate.critic_mask.tolist() == [[False, True, False, False, False, True]]


def test_bi_level_gae() -> None:
    # Two steps of two tokens. Over steps, values at last tokens 1 and 1/2, gamma = 1, lambda = 1/2:
    #   step 2: delta = 2 - 1/2 = 3/2                  A = 3/2                      return 2
    #   step 1: delta = 1 + 1/2 - 1 = 1/2              A = 1/2 + 1/2 * 3/2 = 5/4    return 9/4
    # Over the tokens of a step, gamma = 1/2, gamma lambda = 1/4:
    #   t5: delta = 2 - 1/2                            A = 3/2                      target 2
    #   t4: delta = 1/2 * 1/2 + 1 = 5/4                A = 5/4 + 1/4 * 3/2 = 13/8   target 5/8
    #   t2: delta = 9/4 - 1                            A = 5/4                      target 9/4
    #   t1: delta = 1/2 * 1 - 1/2 = 0                  A = 1/4 * 5/4 = 5/16         target 13/16
    # 5, 20, 26, 24 sixteenths: sum 75, squares 1677; n^2 var = 4 * 1677 - 75^2 = 1083.
    chosen = params("bi_level_gae", gamma=0.5, lam=0.5, step_gamma=1.0, step_lam=0.5)
    made = batch([("PAAOAA", [1, 2], VALUES[0])], with_values=True)
    estimate = bi_level_gae(made, chosen)
    whitened = (np.array([5, 20, 26, 24]) - 75 / 4) / (math.sqrt(1083) / 4)
    np.testing.assert_allclose(estimate.advantages[made.time_steps], whitened, atol=1e-6)
    assert not estimate.advantages[~made.time_steps].any()
    assert estimate.value_targets.tolist() == [[0, 13 / 16, 9 / 4, 0, 5 / 8, 2]]
    assert np.array_equal(estimate.critic_mask, made.time_steps)


@cases("estimator, letters, targets")
def test_value_targets_have_a_lambda_of_their_own(estimator: str, letters: str, targets: list[float]) -> None:
    """With lambda 1 they are the discounted rewards to come, whatever the values; the advantages keep theirs."""
    halves = dict.fromkeys(("gamma", "lam", "step_gamma", "step_lam"), 0.5)
    made = batch([(letters, [1, 2], VALUES[0])], with_values=True)
    one, apart = (ESTIMATORS[estimator](made, params(estimator, **halves, target_lam=lam)) for lam in (None, 1.0))
    assert apart.value_targets.tolist() == [targets]
    assert one.value_targets.tolist() != [targets]
    assert apart.advantages.tolist() == one.advantages.tolist()


@pytest.mark.parametrize(("estimator", "targets"), [(step_gae, [1, 0, 2, 2]), (bi_level_gae, [1, 1, 2, 2])])
def test_a_step_ends_without_a_reward_or_an_observation(estimator: Callable[..., Any], targets: list[float]) -> None:
    # Three steps, AA, A and A. V = 0, discount 1/2 per step: 2; 1 + 2/2 = 2; 0 + 2/2 = 1.
    made = batch([("PAA|AOA", [0, 1, 2])], with_values=True)
    estimate = estimator(made, params("bi_level_gae", step_gamma=0.5))
    assert estimate.value_targets[0, [1, 2, 3, 5]].tolist() == targets


episodes = st.lists(ROW, min_size=1, max_size=5)
share = st.floats(0, 1)


@given(rows=episodes, gamma=share, lam=share, step_gamma=share, step_lam=share)
def test_bi_level_gae_published(rows: list[Any], gamma: float, lam: float, step_gamma: float, step_lam: float) -> None:
    made = batch([("PA", [1]), *rows], with_values=True)
    chosen = params("bi_level_gae", gamma=gamma, lam=lam, step_gamma=step_gamma, step_lam=step_lam)
    targets = bi_level_gae(made, chosen).value_targets
    for rewards, values, steps, found in zip(made.rewards, made.values, made.steps, targets, strict=True):
        np.testing.assert_allclose(found, looped_targets(rewards, values, steps, chosen), atol=1e-12)


def looped_targets(rewards: np.ndarray, values: np.ndarray, steps: np.ndarray, chosen: CreditParams) -> np.ndarray:
    """[L] A + V of one trajectory's action tokens, from the last to the first; 0 elsewhere."""
    targets = np.zeros(len(steps))
    step_advantage = step_value = advantage = value = 0.0
    above = None
    for t in reversed(np.flatnonzero(steps >= 0)):
        if steps[t] == above:
            advantage = chosen.gamma * value - values[t] + chosen.gamma * chosen.lam * advantage
        else:  # the last token of a step
            delta = rewards[t] + chosen.step_gamma * step_value - values[t]
            advantage = step_advantage = delta + chosen.step_gamma * chosen.step_lam * step_advantage
            step_value, above = values[t], steps[t]
        value = values[t]
        targets[t] = advantage + value
    return targets
