import math

import pytest
import torch
from torch import Tensor

from agent_r1.policy.losses import clipped_policy_loss, clipped_tokens, clipped_value_loss, entropy, mismatch_kl

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def of_ratio(ratio: float) -> tuple[Tensor, Tensor]:
    """Logprobs whose ratio is the given one."""
    return torch.tensor([math.log(ratio) - 1.5], requires_grad=True), torch.tensor([-1.5])


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
    logprobs, old_logprobs = of_ratio(ratio)
    value = clipped_policy_loss(logprobs, old_logprobs, torch.tensor([advantage]), **CLIP)
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-6)


def test_policy_loss_is_a_sum() -> None:
    # rho = 1 everywhere: the loss is -(1 + 2 - 4) = 1
    zeros = torch.zeros(3)
    assert clipped_policy_loss(zeros, zeros, torch.tensor([1.0, 2.0, -4.0]), **CLIP).item() == 1.0


def test_clipped_tokens_are_those_without_a_gradient() -> None:
    ratios = torch.tensor([1.0, 1.25, 1.5, 0.5, 1.0, 0.5, 1.5, 4.0])
    advantages = torch.tensor([2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0])
    logprobs = ratios.log().requires_grad_()
    clipped_policy_loss(logprobs, torch.zeros(8), advantages, **CLIP).backward()
    assert logprobs.grad is not None
    count = clipped_tokens(logprobs.detach(), torch.zeros(8), advantages, **CLIP)
    assert count.item() == (logprobs.grad == 0).sum().item() == 3  # (2, 1.5), (-2, 0.5), (-2, 4)


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


def test_value_loss_is_a_sum() -> None:
    # 1^2 / 2 + 3^2 / 2
    values, targets = torch.zeros(2), torch.tensor([1.0, 3.0])
    assert clipped_value_loss(values, values, targets, value_clip=0.5).item() == 5.0


def test_mismatch_kl_by_hand() -> None:
    # x = ln 2: 2 - 1 - ln 2; x = -ln 2: 1/2 - 1 + ln 2; together 1/2
    logprobs = torch.tensor([math.log(2), -math.log(2)])
    assert mismatch_kl(logprobs, torch.zeros(2)).item() == pytest.approx(0.5)
    assert mismatch_kl(logprobs, logprobs).item() == 0.0


def test_mismatch_kl_estimates_the_divergence_under_the_sampler() -> None:
    # The mean of k3 over the sampler's own distribution is KL(sampler || learner) exactly.
    sampler, learner = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    kl = (sampler * (sampler / learner).log()).sum().item()
    estimates = [mismatch_kl(learner[i].log(), sampler[i].log()).item() for i in range(3)]
    assert sum(p * k for p, k in zip(sampler.tolist(), estimates, strict=True)) == pytest.approx(kl, abs=1e-6)


def test_entropy_by_hand() -> None:
    # Uniform over 4: ln 4; a certain token: 0
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [100.0, 0.0, 0.0, 0.0]])
    assert entropy(logits).tolist() == pytest.approx([math.log(4), 0.0], abs=1e-6)
