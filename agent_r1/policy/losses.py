"""Losses over selected tokens: pure functions of tensors [N], one entry per token that the loss runs over.

The caller selects the tokens (`MicroBatch.take`), so a masked token is in no sum and in no graph:
its gradient is exactly zero whatever its advantage or value is, NaN included. Every loss is a **sum**; the caller
divides it by the token count of the whole optimiser step, never by that of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

DUAL_CLIP = 3.0


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's clipped objective with separate bounds, as a sum to minimise.

    With rho = exp(logprob - old_logprob): max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), and for A < 0 at
    most -c A with c = 3, so that an action which has become likely again cannot dominate the step.

    Args:
        logprobs: [N] nats, of the policy being trained.
        old_logprobs: [N] nats, of the policy that acted: the sampler's own at action tokens; at tokens that the
            policy did not sample, the learner's own before the update (the ratio starts at 1).
        advantages: [N].

    Source: Schulman et al. 2017 (arXiv 1707.06347), Eq. 7; clip-higher: DAPO (arXiv 2503.14476), Eq. 10; the cap for
    A < 0: dual-clip PPO, Ye et al. 2020 (arXiv 1912.09729), Eq. 5.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    return torch.where(advantages < 0, torch.minimum(loss, -DUAL_CLIP * advantages), loss).sum()


def clipped_tokens(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """How many of the tokens get no gradient because `clipped_policy_loss` clips them; arguments as there."""
    ratio = torch.exp(logprobs - old_logprobs)
    too_likely = (advantages > 0) & (ratio > 1 + clip_high)
    too_unlikely = (advantages < 0) & ((ratio < 1 - clip_low) | (ratio > DUAL_CLIP))
    return (too_likely | too_unlikely).sum()


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, value_clip: float) -> Tensor:
    """PPO2's clipped value loss: the sum of max((V - T)^2, (clip(V, V_old - c, V_old + c) - T)^2) / 2.

    Args:
        values: [N] of the critic being trained.
        old_values: [N] of the critic before the update.
        targets: [N] what the values should be.

    Source: OpenAI Baselines, ppo2/model.py (`vf_losses1`, `vf_losses2`).
    """
    near_old = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((values - targets) ** 2, (near_old - targets) ** 2).sum()


def mismatch_kl(logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """The k3 estimate of KL(sampler || learner), summed over tokens that the sampler drew; never negative.

    With x = logprob - sampler_logprob each token adds exp(x) - 1 - x. It is 0 where both hold the same weights and
    compute alike, so before an update it measures numerical mismatch or stale weights in the sampler.

    Args:
        logprobs: [N] nats, of the learner before any update.
        sampler_logprobs: [N] nats, recorded with the tokens.

    Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), estimator k3.
    """
    difference = logprobs - sampler_logprobs
    return (torch.expm1(difference) - difference).sum()


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of each of the distributions [N, V] -> [N]."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
