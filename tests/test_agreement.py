"""Agreement with a truth that few draws tell, by hand and where the truth is known."""

import math

import numpy as np
import pytest

from agent_r1.credit.batch import Floats
from benchmarks.agreement import Moments, agreements, jackknife, knowledge


def test_a_weight_of_0_leaves_a_question_out_and_of_2_counts_it_twice() -> None:
    one, other = np.array([[0.0], [3.0]]), np.array([[5.0], [6.0], [10.0]])
    pair = Moments.of([one, other])
    for weights, same in (([0, 1], [other]), ([2, 1], [one, one, other])):
        found = pair.covariances(np.array(weights, float))
        for ours, theirs in zip(found, Moments.of(same).covariances(np.ones(len(same))), strict=True):
            assert ours == pytest.approx(theirs)


def test_agreements_by_hand() -> None:
    # The halves are 2 and 3 by themselves and 1 together, so the truth's own product is 1. An estimate of product 4
    # with itself shares .5 and 1 with the halves: .75 / sqrt(4 * 1).
    products = np.array([[4.0, 0.5, 1.0], [0.5, 2.0, 1.0], [1.0, 1.0, 3.0]])
    assert agreements(products) == pytest.approx([0.75 / 2, 1 / math.sqrt(2.5), 1 / math.sqrt(6)])


def drawn(draws: int, seed: int = 0) -> list[Floats]:
    """Points of 400 questions: the return, a critic, and halves of a truth of variance 1 (question) + 1 (step).

    The return has noise of variance 2, of 4 in all. The critic knows the question's part, and has noise of variance 1.
    """
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(400):
        question, step = rng.normal(), rng.normal(size=20)
        value, noise = question + step, rng.normal(size=(20, 4))
        halves = [value + noise[:, i] * math.sqrt(2 / (draws / 2)) for i in (2, 3)]
        found.append(np.stack([value + noise[:, 0] * math.sqrt(2), question + noise[:, 1], *halves], 1))
    return found


@pytest.mark.parametrize("draws", [2, 8, 64])
def test_no_number_depends_on_how_many_draws_tell_the_truth(draws: int) -> None:
    """State: 1/2 of the variance, half of it between questions. Critic: 2 cov - var = (2 - 2) / 4; there 1/4, -1/4."""
    found = knowledge(Moments.of(drawn(draws)).covariances(np.ones(400)))
    assert found[:, 0] == pytest.approx([1 / 2, 1 / 4, 1 / 4], abs=0.04)
    assert found[:, 1] == pytest.approx([0, 1 / 4, -1 / 4], abs=0.06)
    assert found[:, 2] == pytest.approx([1 / 2, 1, 0], abs=0.06)  # cov 1, variances 2 and 2; a mean of 20 has no noise


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    # Values 1, 2, 6: variance 7, standard error sqrt(7 / 3); Student's 97.5 % point of 2 degrees is 4.303.
    values = np.array([1.0, 2.0, 6.0])
    [found] = jackknife(lambda weights: np.array([weights @ values / weights.sum()]), 3)
    assert (found.mean, found.high - 3) == pytest.approx((3, 4.3027 * math.sqrt(7 / 3)), rel=1e-4)
    with pytest.raises(ValueError, match="one question"):
        jackknife(lambda weights: weights, 1)
