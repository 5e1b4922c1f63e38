import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_r1.learn.losses import (
    clipped_policy_loss,
    clipped_tokens,
    clipped_value_loss,
    importance_weights,
    k3,
    policy_ratio,
)
from agent_r1.params import load

CLIP = load(Path(__file__).parents[2] / "params.yaml").train.update.model_copy(
    update={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
)


def logs(*numbers: float, **options: Any) -> Tensor:
    return torch.tensor([math.log(number) for number in numbers], **options)


def test_ratio_of_tokens() -> None:
    assert policy_ratio(logs(0.2, 0.3), logs(0.1, 0.6)).tolist() == pytest.approx([2, 0.5])


def test_ratio_of_spans_is_their_geometric_mean() -> None:
    # (2 * 8)^(1/2) = 4, (1/2 * 1 * 1/4)^(1/3) = 1/2, and a span of one token
    ratio = policy_ratio(logs(2, 8, 0.5, 1, 0.25, 3), torch.zeros(6), [2, 3, 1])
    assert ratio.tolist() == pytest.approx([4, 4, 0.5, 0.5, 0.5, 3])


def test_the_tokens_of_a_span_share_its_gradient() -> None:
    # d(rho)/d(logprob) = rho / length at each token of the span, and each of its tokens carries rho: rho in total.
    logprobs = logs(2, 8, 3, requires_grad=True)
    policy_ratio(logprobs, torch.zeros(3), [2, 1]).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([4, 4, 3])


def test_logarithms_of_ratios_end_at_20_nats_and_have_no_gradient_there() -> None:
    # 21 and -1000 nats, and a span whose mean is 30; 19 and a span of mean 2 stay as they are.
    logprobs = torch.tensor([21.0, -1000.0, 19.0], requires_grad=True)
    ratio = policy_ratio(logprobs, torch.zeros(3))
    ratio.sum().backward()
    assert ratio.log().tolist() == pytest.approx([20, -20, 19])
    assert logprobs.grad is not None
    assert logprobs.grad.log().tolist() == pytest.approx([-math.inf, -math.inf, 19])
    assert policy_ratio(torch.tensor([50.0, 10, 3, 1]), torch.zeros(4), [2, 2]).log().tolist() == [20, 20, 2, 2]


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (2.0, 1.0, -2.0, -2.0),  # inside the range: -A rho, slope d(-A rho)/d(logprob) = -A rho
        (2.0, 1.25, -2.5, -2.5),  # above 1 + clip_low but below 1 + clip_high: clip-higher lets it pass
        (2.0, 1.5, -2.56, 0.0),  # max(-3, -2 * 1.28)
        (2.0, 0.5, -1.0, -1.0),  # max(-1, -2 * 0.8): the pessimistic bound does not help a lost action
        (-2.0, 1.0, 2.0, 2.0),
        (-2.0, 0.5, 1.6, 0.0),  # max(1, 2 * 0.8): already unlikely enough
        (-2.0, 1.5, 3.0, 3.0),  # max(3, 2 * 1.28)
        (-2.0, 4.0, 6.0, 0.0),  # max(8, 2.56), capped at 3 * 2
        (0.0, 1.5, 0.0, 0.0),
    ],
)
def test_clipped_policy_loss_by_hand(advantage: float, ratio: float, loss: float, slope: float) -> None:
    logprobs = logs(ratio, requires_grad=True)
    value = clipped_policy_loss(torch.exp(logprobs), torch.tensor([advantage]), CLIP)
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(("dual_clip", "loss"), [(2.0, 4.0), (3.0, 6.0), (5.0, 8.0), (0.0, 8.0)])
def test_the_dual_clip_bounds_the_ratio_of_bad_actions(dual_clip: float, loss: float) -> None:
    # A = -2, rho = 4: max(8, 2.56), capped at dual_clip * 2; 0 is no cap
    bounds = CLIP.model_copy(update={"dual_clip": dual_clip})
    assert clipped_policy_loss(torch.tensor([4.0]), torch.tensor([-2.0]), bounds).item() == loss
    assert clipped_tokens(torch.tensor([4.0]), torch.tensor([-2.0]), bounds).item() == (0 < dual_clip < 4)


def test_clipped_tokens_are_those_without_a_gradient() -> None:
    ratios = torch.tensor([1.0, 1.25, 1.5, 0.5, 1.0, 0.5, 1.5, 4.0])
    advantages = torch.tensor([2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0])
    logprobs = ratios.log().requires_grad_()
    clipped_policy_loss(torch.exp(logprobs), advantages, CLIP).sum().backward()
    assert logprobs.grad is not None
    clipped = clipped_tokens(ratios, advantages, CLIP)
    assert clipped.tolist() == (logprobs.grad == 0).tolist()
    assert clipped.sum() == 3  # (2, 1.5), (-2, 0.5), (-2, 4)


def test_importance_weights_by_hand() -> None:
    # Twice as likely for the learner as for the sampler: 2; half as likely: 1/2; 8 and e^1000 times: the cap
    weights = importance_weights(torch.cat([logs(2, 0.5, 1, 8), torch.tensor([1000.0])]), torch.zeros(5), cap=4.0)
    assert weights.tolist() == pytest.approx([2, 0.5, 1, 4, 4])


@pytest.mark.parametrize(
    ("value", "old_value", "target", "loss"),
    [
        (1.2, 1.0, 2.0, 0.32),  # within the clip: 0.8^2 / 2
        (2.0, 1.0, 2.0, 0.125),  # clipped to 1.5: max(0, 0.5^2) / 2
        (0.0, 1.0, 2.0, 2.0),  # clipped to 0.5: max(2^2, 1.5^2) / 2
    ],
)
def test_clipped_value_loss_by_hand(value: float, old_value: float, target: float, loss: float) -> None:
    tensors = [torch.tensor([number]) for number in (value, old_value, target)]
    assert clipped_value_loss(*tensors, value_clip=0.5).item() == pytest.approx(loss)


def test_k3_by_hand() -> None:
    # x = ln 2: 2 - 1 - ln 2; x = -ln 2: 1/2 - 1 + ln 2; x = 0: 0
    estimates = k3(torch.zeros(3), logs(2, 0.5, 1))
    assert estimates.tolist() == pytest.approx([1 - math.log(2), math.log(2) - 0.5, 0])


def test_an_estimate_of_k3_ends_at_10_and_has_no_gradient_there() -> None:
    # Drawn with log q - log p of 12, -100, 3 and 2; e^3 - 1 - 3 > 10; the slope in log p at x = 2 is -(e^2 - 1).
    logprobs = torch.tensor([-12.0, 100.0, -3.0, -2.0], requires_grad=True)
    estimates = k3(logprobs, torch.zeros(4))
    estimates.sum().backward()
    assert estimates.tolist() == pytest.approx([10, 10, 10, math.expm1(2) - 2])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, 0, 0, -math.expm1(2)])


def test_k3_estimates_the_divergence_from_the_distribution_that_drew() -> None:
    # The mean of k3 over p's own draws is KL(p || q) exactly.
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    kl = (p * (p / q).log()).sum().item()
    assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx(kl, abs=1e-6)


def normal(*shape: int, scale: float = 1.0, seed: int = 0, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_(bool(options))


@pytest.mark.parametrize(
    "loss",
    [
        lambda logprobs: policy_ratio(logprobs, normal(12, seed=1)),
        lambda logprobs: policy_ratio(logprobs, normal(12, seed=1), [3, 1, 6, 2]),
        lambda logprobs: clipped_policy_loss(torch.exp(logprobs), normal(12, seed=1), CLIP),
        lambda logprobs: k3(logprobs, normal(12, seed=1)),
        lambda logprobs: k3(normal(12, seed=1), logprobs),
        lambda values: clipped_value_loss(values, normal(12, seed=1), normal(12, seed=2), value_clip=0.5),
    ],
    ids=["ratio", "ratio of spans", "policy", "k3 drawn", "k3 other", "value"],
)
def test_gradients_agree_with_finite_differences(loss: Callable[[Tensor], Tensor]) -> None:
    assert torch.autograd.gradcheck(loss, [normal(12, requires_grad=True)])
