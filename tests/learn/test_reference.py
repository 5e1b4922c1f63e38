from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.learn.learner import Reference, reference_of
from agent_r1.records import Trajectory
from tests.learn.learning import LORA, Samples

Make = Callable[..., Any]


@pytest.fixture
def reference(tiny_model: Path, make_learner: Make) -> Reference:
    return reference_of(make_learner(with_critic=False), tiny_model)


def test_it_scores_masked_tokens_as_the_policy_it_is(
    reference: Reference, make_learner: Make, trajectories: list[Trajectory]
) -> None:
    masks = [each.action_mask for each in trajectories]
    scores = reference.logprobs(trajectories, masks), make_learner().logprobs(trajectories)
    for found, own, mask in zip(*scores, masks, strict=True):
        assert found.dtype == np.float32
        assert not found[~mask].any()
        np.testing.assert_allclose(found[mask], own[mask], atol=1e-5)


def test_it_stays_what_it_was_while_a_policy_learns(reference: Reference, make_learner: Make, samples: Samples) -> None:
    masks = [each.action_mask for each in samples.trajectories]
    before = reference.logprobs(samples.trajectories, masks)
    learner = make_learner(learning_rate=0.01)
    learner.update(*samples, 0)
    for left, right in zip(before, reference.logprobs(samples.trajectories, masks), strict=True):
        assert left.tolist() == right.tolist()
    assert not any(parameter.requires_grad for parameter in reference.policy.parameters())


def test_with_adapters_it_is_the_learners_own_model(
    reference: Reference, tiny_model: Path, make_learner: Make, samples: Samples
) -> None:
    """No second copy, and what it says is what the model said before its adapters were trained."""
    learner = make_learner(adapter=LORA, learning_rate=0.01)
    beneath = reference_of(learner, tiny_model)
    assert beneath.policy is learner.policy
    learner.update(*samples, 0)
    masks = [each.action_mask for each in samples.trajectories]
    scores = [each.logprobs(samples.trajectories, masks) for each in (reference, beneath)]
    for left, right, own, mask in zip(*scores, learner.logprobs(samples.trajectories), masks, strict=True):
        assert left.tolist() == right.tolist()
        assert np.abs(own[mask] - right[mask]).max() > 1e-3, "the adapters are back in place afterwards"
