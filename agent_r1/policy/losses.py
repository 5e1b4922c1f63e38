"""The terms of the losses at selected tokens: pure functions of tensors [N], one entry per token of a loss.

The caller selects the tokens (`MicroBatch.take`), so a masked token is in no sum and in no graph:
its gradient is exactly zero whatever its advantage or value is, NaN included. Every term stands alone; the caller
weighs and adds them up over the whole optimiser step, never over a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor, spans: Sequence[int] | None = None) -> Tensor:
    """[N] how much likelier the tokens have become: the geometric mean of exp(logprob - old_logprob) over their span.

    Args:
        logprobs: [N] nats, of the policy being trained.
        old_logprobs: [N] nats, of the policy before the update.
        spans: lengths of consecutive spans that add up to N; None takes every token for itself.

    Source: tokens: PPO (arXiv 1707.06347), §3; sequences: GSPO (arXiv 2507.18071), Eq. 7; steps of an agent: StepPO
    (arXiv 2604.18401). As in GSPO's Eq. 5 the gradient goes through the mean: where advantages differ within a span,
    its tokens share their effect.
    """
    log_ratio = logprobs - old_logprobs
    if spans is not None:
        log_ratio = torch.cat([span.mean().expand_as(span) for span in log_ratio.split(list(spans))])
    return torch.exp(log_ratio)


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> Tensor:
    """[N] PPO's clipped objective with separate bounds, to minimise.

    max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), and for A < 0 at most -dual_clip A, so that an action
    which has become likely again cannot dominate the step.

    Args:
        ratio: [N] rho, of new to old probability.
        advantages: [N].

    Source: Schulman et al. 2017 (arXiv 1707.06347), Eq. 7; clip-higher: DAPO (arXiv 2503.14476), Eq. 10; the cap for
    A < 0: dual-clip PPO, Ye et al. 2020 (arXiv 1912.09729), Eq. 5.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def clipped_tokens(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float) -> Tensor:
    """[N] true where `clipped_policy_loss` clips the token, which gets no gradient from it; arguments as there."""
    too_likely = (advantages > 0) & (ratio > 1 + clip_high)
    too_unlikely = (advantages < 0) & ((ratio < 1 - clip_low) | (ratio > dual_clip))
    return too_likely | too_unlikely


def importance_weights(logprobs: Tensor, sampler_logprobs: Tensor, *, cap: float) -> Tensor:
    """[N] min(exp(logprob - sampler_logprob), cap): what a token drawn by the sampler counts for the learner.

    Args:
        logprobs: [N] nats, of the learner before the update.
        sampler_logprobs: [N] nats, recorded with the tokens.
        cap: the largest weight.

    Source: truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (fengyao.notion.site/off-policy-rl).
    """
    return torch.exp((logprobs - sampler_logprobs).clamp(max=math.log(cap)))


def k3(logprobs: Tensor, others: Tensor) -> Tensor:
    """[N] an estimate of KL(p || q) at each of the tokens that p drew; never negative.

    With x = log q - log p it is exp(x) - 1 - x. Between sampler and learner it is 0 where both hold the same weights
    and compute alike; before an update it measures numerical mismatch, or stale weights in the sampler.

    Args:
        logprobs: [N] nats, log p of the distribution that drew the tokens.
        others: [N] nats, log q.

    Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); as a loss: DeepSeekMath
    (arXiv 2402.03300), Eq. 4.
    """
    difference = others - logprobs
    return torch.expm1(difference) - difference


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of each of the distributions [N, V] -> [N]."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, value_clip: float) -> Tensor:
    """[N] PPO2's clipped value loss: max((V - T)^2, (clip(V, V_old - c, V_old + c) - T)^2) / 2.

    Args:
        values: [N] of the critic being trained.
        old_values: [N] of the critic before the update.
        targets: [N] what the values should be.

    Source: OpenAI Baselines, ppo2/model.py (`vf_losses1`, `vf_losses2`).
    """
    near_old = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((values - targets) ** 2, (near_old - targets) ** 2)
