"""REINFORCE++ with and without a baseline, against numbers worked by hand."""

import math

import numpy as np

from agent_r1.credit.estimators import reinforce_pp, reinforce_pp_baseline
from tests.credit.letters import batch, params


def test_earlier_steps_receive_the_return_across_observations() -> None:
    # The reward is the last step's. Discounted by 1/2 per action token, three observation tokens or none in between:
    # 1/8, 1/4, 1/2, 1: sum 15/8, squares 85/64; n^2 var = 4 * 85/64 - (15/8)^2 = 115/64.
    estimate = reinforce_pp(batch([("PAAOTOAOA", [0, 0, 1])]), params("reinforce_pp", gamma=0.5))
    std = math.sqrt(115) / 8 / 4
    expected = [(return_ - 15 / 32) / std for return_ in (1 / 8, 1 / 4, 1 / 2, 1)]
    np.testing.assert_allclose(estimate.advantages[0, [1, 2, 6, 8]], expected, atol=1e-6)
    assert not estimate.advantages[0, [0, 3, 4, 5, 7]].any()
    assert not estimate.value_targets.any()
    assert not estimate.critic_mask.any()


def test_without_the_mask_observation_tokens_discount_too() -> None:
    # "PAOA", gamma 1/2: 1/4, 1/2, 1 at all tokens after the prompt, and statistics over the actions 1/4 and 1.
    made = batch([("PAOA", [0, 1])], recursion=False)
    advantages = reinforce_pp(made, params("reinforce_pp", gamma=0.5)).advantages
    np.testing.assert_allclose(advantages, [[0, -1, -1 / 3, 1]], atol=1e-6)


def test_the_baseline_is_the_groups_mean() -> None:
    # Group 1: returns 3 and 0, deviations 3/2 at two tokens and -3/2 at one. Group 2: equal, 0 at three tokens.
    # Over the six: mean 1/4, squares 27/4; n^2 var = 6 * 27/4 - (3/2)^2 = 153/4.
    made = batch([("PAOA", [1, 2]), ("PAA", [1]), ("PA", []), ("PA", [1])], groups=[1, 2, 1, 2])
    estimate = reinforce_pp_baseline(made, params("reinforce_pp_baseline"))
    std = math.sqrt(153) / 2 / 6
    high, low, equal = (1.5 - 0.25) / std, (-1.5 - 0.25) / std, -0.25 / std
    expected = [[0, high, 0, high], [0, equal, equal, 0], [0, low, 0, 0], [0, equal, 0, 0]]
    np.testing.assert_allclose(estimate.advantages, expected, atol=1e-6)
    assert not estimate.critic_mask.any()
