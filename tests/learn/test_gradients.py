"""Gradients as vectors: angles by hand, and the two parts against plain autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from agent_r1.inspection.replay import PolicyGradient, cosine, policy_gradient
from agent_r1.learn.learner import Learner
from agent_r1.params.train import UpdateParams
from agent_r1.records import Credit, Trajectory
from tests.learn.learning import Samples

MakeLearner = Callable[..., Learner]
MakeCredit = Callable[..., Credit]


def vector(*entries: float) -> Tensor:
    return torch.tensor(entries)


def gradient(sampled: Tensor, observed: Tensor) -> PolicyGradient:
    return PolicyGradient(sampled=sampled, observed=observed, metrics={"policy/loss": 0.5}, observed_loss_share=0.25)


def measured(
    learner: Learner, trajectories: list[Trajectory], credits_: list[Credit], params: UpdateParams
) -> PolicyGradient:
    return policy_gradient(learner.policy, trajectories, credits_, params, learner.compute)


def after_prompt(trajectory: Trajectory) -> np.ndarray:
    return np.logical_or.accumulate(trajectory.action_mask)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (vector(1, 0), vector(5, 0), 1.0),
        (vector(1, 0), vector(0, 2), 0.0),
        (vector(1, 0), vector(-3, 0), -1.0),
        (vector(1, 0), vector(1, 1), math.sqrt(0.5)),
        (vector(3, 4), vector(4, 3), 0.96),  # 24 / 25
        (vector(0, 0), vector(1, 0), math.nan),  # zeros have no direction
    ],
)
def test_cosine(one: Tensor, other: Tensor, expected: float) -> None:
    assert cosine(one, other) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_the_numbers_of_a_gradient() -> None:
    """Parts (3, 0) and (0, 4): norm 5, of which 16 of 25 is observed; (1, 0) makes an angle of cosine 3 / 5 with it."""
    metrics = gradient(vector(3, 0), vector(0, 4)).compared_with(gradient(vector(1, 0), vector(0, 0)))
    assert metrics == pytest.approx(
        {
            "policy/loss": 0.5,
            "policy/grad_norm": 5.0,
            "policy/observed_loss_share": 0.25,
            "policy/observed_gradient_share": 0.64,
            "policy/gradient_cosine": 0.6,
        }
    )


def plain_gradient(
    model: PreTrainedModel, trajectories: list[Trajectory], credits_: list[Credit], *, of: str
) -> Tensor:
    """Of -mean(A log p) over the loss tokens, of which only those `of` one kind are summed; one trajectory at a time.

    On the policy that sampled the tokens it is the gradient of every ratio loss.
    """
    terms, count = [], 0
    for trajectory, credit in zip(trajectories, credits_, strict=True):
        ids = torch.as_tensor(trajectory.token_ids, dtype=torch.long)
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        kind = {"sampled": trajectory.action_mask, "observed": ~trajectory.action_mask}[of]
        chosen = torch.as_tensor(credit.loss_mask & kind)[1:]
        terms.append((-torch.as_tensor(credit.advantages)[1:] * logprobs)[chosen].sum())
        count += int(credit.loss_mask.sum())
    found = torch.autograd.grad(sum(terms[1:], terms[0]) / count, list(model.parameters()))
    return torch.cat([each.flatten() for each in found])


def test_the_parts_are_those_of_plain_autograd(
    make_learner: MakeLearner,
    trajectories: list[Trajectory],
    make_credit: MakeCredit,
    update_params: UpdateParams,
    tiny_model: Path,
) -> None:
    credits_ = [make_credit(each, loss_mask=after_prompt(each)) for each in trajectories]
    found = measured(make_learner(with_critic=False), trajectories, credits_, update_params)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for part, name in ((found.sampled, "sampled"), (found.observed, "observed")):
        expected = plain_gradient(model, trajectories, credits_, of=name)
        assert expected.norm() > 0.1
        assert (part - expected).norm() < 1e-4 * expected.norm()
    acting = sum(np.abs(c.advantages[t.action_mask]).sum() for c, t in zip(credits_, trajectories, strict=True))
    everywhere = sum(np.abs(c.advantages[c.loss_mask]).sum() for c in credits_)
    assert found.observed_loss_share == pytest.approx(1 - acting / everywhere, rel=1e-4)
    assert 0 < found.observed_share < 1


def test_the_loss_mask_leaves_nothing_to_observations(
    make_learner: MakeLearner, samples: Samples, update_params: UpdateParams
) -> None:
    trajectories, credits_ = samples
    found = measured(make_learner(with_critic=False), trajectories, credits_, update_params)
    assert not found.observed.any()
    assert (found.observed_share, found.observed_loss_share) == (0, 0)
    assert found.total.norm() > 0.1


@pytest.mark.parametrize("changes", [{"ratio": "sequence"}, {"ratio": "step", "entropy_bonus": 0.1}, {"kl_loss": 0.2}])
def test_the_parts_add_up_to_the_step_that_training_takes(
    changes: dict[str, object],
    make_learner: MakeLearner,
    trajectories: list[Trajectory],
    make_credit: MakeCredit,
    update_params: UpdateParams,
) -> None:
    """The gradient norm of one training step over all trajectories, before clipping, is the norm of the sum."""
    learner = make_learner(with_critic=False, **changes)
    credits_ = [make_credit(each, loss_mask=after_prompt(each)) for each in trajectories]
    found = measured(learner, trajectories, credits_, learner.params)
    assert found.observed.any()
    trained = learner.update(trajectories, credits_, iteration=0)
    assert found.total.norm().item() == pytest.approx(trained["policy/grad_norm"], rel=1e-4)
    assert found.metrics["policy/loss"] == pytest.approx(trained["policy/loss"], abs=1e-6)


def test_nothing_is_left_behind(make_learner: MakeLearner, samples: Samples, update_params: UpdateParams) -> None:
    learner = make_learner(with_critic=False)
    before = [weight.clone() for weight in learner.policy.parameters()]
    measured(learner, *samples, update_params)
    assert all(weight.grad is None for weight in learner.policy.parameters())
    assert all(map(torch.equal, before, learner.policy.parameters()))


def test_trajectories_that_are_not_kept_have_no_part(
    make_learner: MakeLearner, trajectories: list[Trajectory], make_credit: MakeCredit, update_params: UpdateParams
) -> None:
    learner = make_learner(with_critic=False)
    nowhere = np.zeros(len(trajectories[0].token_ids), np.bool_)
    dropped = make_credit(trajectories[0], loss_mask=nowhere, kept=False)
    some = measured(learner, trajectories[:2], [dropped, make_credit(trajectories[1])], update_params)
    alone = measured(learner, trajectories[1:2], [make_credit(trajectories[1])], update_params)
    assert cosine(some.total, alone.total) == pytest.approx(1)
    assert some.total.norm().item() == pytest.approx(alone.total.norm().item())
    none = measured(learner, trajectories[:1], [dropped], update_params)
    assert (none.metrics, none.observed_loss_share, none.total.any().item()) == ({}, 0, False)
