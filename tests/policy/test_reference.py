from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.params import UpdateParams
from agent_r1.policy.reference import Reference
from agent_r1.records import Trajectory

Make = Callable[..., Any]


@pytest.fixture
def reference(tiny_model: Path, update_params: UpdateParams) -> Reference:
    return Reference(tiny_model, update_params, dtype="float32", device=torch.device("cpu"))


def test_it_scores_masked_tokens_as_the_policy_it_is(
    reference: Reference, make_learner: Make, trajectories: list[Trajectory]
) -> None:
    masks = [each.action_mask for each in trajectories]
    for found, own, mask in zip(
        reference.logprobs(trajectories, masks), make_learner().logprobs(trajectories), masks, strict=True
    ):
        assert found.dtype == np.float32
        assert not found[~mask].any()
        np.testing.assert_allclose(found[mask], own[mask], atol=1e-5)


def test_it_stays_what_it_was_while_a_policy_learns(
    reference: Reference, make_learner: Make, trajectories: list[Trajectory], make_credit: Make
) -> None:
    masks = [each.action_mask for each in trajectories]
    before = reference.logprobs(trajectories, masks)
    learner = make_learner(learning_rate=0.01)
    learner.update(trajectories, [make_credit(each) for each in trajectories], 0)
    for left, right in zip(before, reference.logprobs(trajectories, masks), strict=True):
        assert left.tolist() == right.tolist()
    assert not any(parameter.requires_grad for parameter in reference.policy.parameters())
