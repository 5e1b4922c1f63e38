"""Gradients as vectors, their two parts against plain autograd, and the rows of an update that they are made of."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from agent_r1.inspection.replay import PolicyGradient, policy_gradient
from agent_r1.learn import scoring
from agent_r1.learn.gradients import (
    add_policy_gradient,
    asked_of_learner,
    credited,
    not_finite_in,
    require_none,
    span_lengths,
)
from agent_r1.learn.learner import Learner
from agent_r1.learn.losses import policy_metrics
from agent_r1.learn.scoring import Compute, micro_batches
from agent_r1.params.train import UpdateParams
from agent_r1.records import Credit, Trajectory
from benchmarks import families
from benchmarks.synthetic import shipped_with
from tests.learn.learning import CPU, UPDATE, gradients, make_credit, make_trajectory, with_changes

MakeLearner = Callable[..., Learner]


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


def test_parts_are_plain_autograds(make_learner: MakeLearner, trajectories: list[Trajectory], tiny_model: Path) -> None:
    credits_ = [make_credit(each, loss_mask=after_prompt(each)) for each in trajectories]
    found = measured(make_learner(with_critic=False), trajectories, credits_, UPDATE)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for part, name in ((found.sampled, "sampled"), (found.observed, "observed")):
        expected = plain_gradient(model, trajectories, credits_, of=name)
        assert expected.norm() > 0.1
        assert (part - expected).norm() < 1e-4 * expected.norm()
    acting = sum(np.abs(c.advantages[t.action_mask]).sum() for c, t in zip(credits_, trajectories, strict=True))
    everywhere = sum(np.abs(c.advantages[c.loss_mask]).sum() for c in credits_)
    assert found.observed_loss_share == pytest.approx(1 - acting / everywhere, rel=1e-4)
    assert 0 < found.observed_share < 1


@pytest.mark.parametrize("changes", [{"ratio": "sequence"}, {"ratio": "step", "entropy_bonus": 0.1}, {"kl_loss": 0.2}])
def test_the_parts_add_up_to_the_step_that_training_takes(
    changes: dict[str, object], make_learner: MakeLearner, trajectories: list[Trajectory]
) -> None:
    """The gradient norm of one training step over all trajectories, before clipping, is the norm of the sum."""
    learner = make_learner(with_critic=False, **changes)
    credits_ = [make_credit(each, loss_mask=after_prompt(each)) for each in trajectories]
    found = measured(learner, trajectories, credits_, learner.params)
    assert found.observed.any()
    trained = learner.update(trajectories, credits_, iteration=0)
    assert found.total.norm().item() == pytest.approx(trained["policy/grad_norm"], rel=1e-4)
    assert found.metrics["policy/loss"] == pytest.approx(trained["policy/loss"], abs=1e-6)


@pytest.mark.parametrize("changes", [{}, {"packing": True}, {"gradient_checkpointing": True}])
def test_the_balance_of_experts_has_the_gradient_of_transformers_own_loss(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of eight experts a token, in two layers; the output layer goes three tokens at a time."""
    monkeypatch.setattr(scoring, "CHUNK", 3 * families.WORDS)
    families.make_model("Qwen3-MoE", tmp_path)
    settings = shipped_with({"model": changes, "train": {"update": {"balance_loss": 0.5}}})
    learner = Learner(tmp_path, settings.train.update, settings.model, with_critic=False, seed=0)
    episode = make_trajectory(0, [P, P, A, A, A, A, A, O, A, A])
    credit = replace(make_credit(episode), advantages=np.zeros(10, np.float32))
    rows = learner.credited([episode], [credit])
    tokens = add_policy_gradient(learner.policy, rows, 7, learner.params, learner.compute, learn=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.as_tensor(episode.token_ids, dtype=torch.long)[None]
    predictors = torch.as_tensor([*credit.loss_mask[1:], False])[None]
    routers = model(ids, output_router_logits=True).router_logits
    expected = sum(load_balancing_loss_func((logits,), 8, 2, predictors) for logits in routers) / len(routers) / 2
    (0.5 * expected).backward()
    assert tokens.balance.tolist() == pytest.approx([expected.item()] * 7)
    assert policy_metrics(tokens, learner.params, 7, 7)["policy/loss"] == pytest.approx(0.5 * expected.item())
    own = gradients(learner.policy)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-4, atol=1e-7)
    assert own["model.layers.1.mlp.gate.weight"].norm() > 1e-3


def test_a_balance_of_experts_is_refused_where_there_are_none(make_learner: MakeLearner) -> None:
    with pytest.raises(ValueError, match=r"balance_loss 0.1 has no effect: .* has no experts; set it to 0"):
        make_learner(with_critic=False, balance_loss=0.1)


P, A, O = 0, 1, 2  # noqa: E741
RATIOS = ["token", "step", "sequence"]


def compute(max_tokens: int) -> Compute:
    return Compute(device=CPU, dtype=torch.float32, max_tokens=max_tokens)


def test_spans_follow_the_steps() -> None:
    episode = make_trajectory(0, [P, P, A, A, A, O, O, A, A])
    by = {ratio: with_changes(UPDATE, ratio=ratio) for ratio in RATIOS}
    on, off = episode.action_mask, np.arange(9) > 1
    assert [span_lengths(episode, on, by[ratio]) for ratio in RATIOS] == [None, [3, 2], [5]]
    assert span_lengths(episode, off, by["step"]) == [5, 2], "an observation belongs to the step that it answers"
    assert span_lengths(episode, off, by["sequence"]) == [7]
    touching = make_trajectory(0, [P, A, A, A])
    first, second = replace(touching.steps[0], action_stop=2), replace(touching.steps[0], action_start=2)
    assert span_lengths(replace(touching, steps=[first, second]), touching.action_mask, by["step"]) == [1, 2]


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_where_old_logprobs_come_from(cap: float) -> None:
    samplers = np.array([0, -1, 0, -2], np.float32)
    episode = make_trajectory(0, [P, A, O, A], samplers)
    credit = make_credit(episode, loss_mask=[False, True, True, True])
    params = with_changes(UPDATE, importance_cap=cap)
    assert asked_of_learner(episode, credit, params).tolist() == [False, bool(cap), True, bool(cap)]
    own = np.array([0, -1.5, -3, -2.5], np.float32)
    row = credited(episode, credit, own, params)
    assert row.sampler_logprobs.tolist() == [0, -1, -3, -2]
    assert row.old_logprobs.tolist() == ([0, -1.5, -3, -2.5] if cap else [0, -1, -3, -2])
    assert row.importance.tolist() == pytest.approx([1, np.exp(-0.5), 1, np.exp(-0.5)] if cap else [1, 1, 1, 1])
    assert not asked_of_learner(episode, make_credit(episode, kept=False), params).any()


def test_what_is_not_finite_is_named_by_trajectory() -> None:
    episodes = [make_trajectory(index, [P, A, A]) for index in range(3)]
    masks = [each.action_mask for each in episodes]
    [batch] = micro_batches(episodes, masks, compute(100))
    fine, broken = torch.zeros(6), torch.tensor([0, 0, torch.nan, 0, 0, torch.inf])
    require_none("policy loss", not_finite_in(batch, episodes, fine, fine), compute(100))
    with pytest.raises(FloatingPointError, match=r"policy loss is not finite in trajectories 0/q1/0, 0/q2/0;"):
        require_none("policy loss", not_finite_in(batch, episodes, fine, broken), compute(100))
