"""The policy's objective: what a token adds to the loss, and how the tokens of an optimiser step are averaged.

Pure functions of tensors. Whether the tokens are those of one micro-batch or of the whole step makes no difference:
rows are whole, and what their sum is divided by belongs to the step.

Legend for shapes: N = tokens that the loss runs over, row after row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from agent_r1.params import UpdateParams
from agent_r1.policy import losses

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The tokens that the policy loss runs over; `logprobs` and `entropy` carry the gradient."""

    logprobs: Tensor  # [N] the learner's, nats
    entropy: Tensor  # [N] of the distribution that predicts the token, nats
    old_logprobs: Tensor  # [N] the denominators of the ratio, nats
    sampler_logprobs: Tensor  # [N] nats; at tokens that were not sampled, the learner's own before the update
    reference_logprobs: Tensor  # [N] nats; 0 without a reference
    advantages: Tensor  # [N]
    weights: Tensor  # [N] of the token in the step's sum, as `token_weight` has it
    sampled: Tensor  # [N] bool, true at action tokens
    spans: list[int] | None  # lengths of the spans that share a ratio; None where every token has its own

    def detach(self) -> Self:
        """The same without a graph."""
        return replace(self, logprobs=self.logprobs.detach(), entropy=self.entropy.detach())


def concatenate(pieces: Sequence[Tokens]) -> Tokens:
    """The tokens of several micro-batches as one."""
    return Tokens(
        logprobs=torch.cat([piece.logprobs for piece in pieces]),
        entropy=torch.cat([piece.entropy for piece in pieces]),
        old_logprobs=torch.cat([piece.old_logprobs for piece in pieces]),
        sampler_logprobs=torch.cat([piece.sampler_logprobs for piece in pieces]),
        reference_logprobs=torch.cat([piece.reference_logprobs for piece in pieces]),
        advantages=torch.cat([piece.advantages for piece in pieces]),
        weights=torch.cat([piece.weights for piece in pieces]),
        sampled=torch.cat([piece.sampled for piece in pieces]),
        spans=None if pieces[0].spans is None else [span for piece in pieces for span in piece.spans or []],
    )


def token_losses(tokens: Tokens, params: UpdateParams) -> Tensor:
    """[N] every token's loss: the clipped objective, the KL to the reference (k3), minus the entropy bonus.

    With an importance cap the clipped objective is weighted for the mismatch of sampler and learner.
    """
    ratio = losses.policy_ratio(tokens.logprobs, tokens.old_logprobs, tokens.spans)
    terms = losses.clipped_policy_loss(
        ratio,
        tokens.advantages,
        clip_low=params.clip_low,
        clip_high=params.clip_high,
        dual_clip=params.dual_clip,
    )
    if params.importance_cap:
        old, samplers = tokens.old_logprobs, tokens.sampler_logprobs
        terms = terms * losses.importance_weights(old, samplers, cap=params.importance_cap)
    if params.kl_loss:
        terms = terms + params.kl_loss * losses.k3(tokens.logprobs, tokens.reference_logprobs)
    if params.entropy_bonus:
        terms = terms - params.entropy_bonus * tokens.entropy
    return terms


def token_weight(length: int, params: UpdateParams) -> float:
    """What each loss token of a trajectory with `length` of them weighs in the sum over an optimiser step."""
    return 1 / length if params.aggregation == "sequence_mean" and length else 1.0


def normaliser(lengths: Sequence[int], params: UpdateParams) -> int:
    """What the weighted sum over an optimiser step is divided by.

    Args:
        lengths: loss tokens of every trajectory of the step, kept or not; one without any counts nowhere.
        params: `token_mean` divides by the tokens; `sequence_mean` by the trajectories, each of which enters with its
            mean; `constant_length` by the trajectories times a constant, so that no length is favoured.

    Source: token_mean: DAPO (arXiv 2503.14476), Eq. 8; sequence_mean: DeepSeekMath (arXiv 2402.03300), Eq. 3;
    constant_length: Dr. GRPO (arXiv 2503.20783), §3.2.
    """
    trajectories = sum(length > 0 for length in lengths)
    return {
        "token_mean": sum(lengths),
        "sequence_mean": trajectories,
        "constant_length": trajectories * params.constant_length,
    }[params.aggregation]


def policy_metrics(tokens: Tokens, params: UpdateParams, divisor: int) -> Metrics:
    """The numbers of one optimiser step, from all its tokens; `divisor` is the step's `normaliser`."""
    ratio = losses.policy_ratio(tokens.logprobs, tokens.old_logprobs, tokens.spans)
    clipped = losses.clipped_tokens(
        ratio,
        tokens.advantages,
        clip_low=params.clip_low,
        clip_high=params.clip_high,
        dual_clip=params.dual_clip,
    )
    learners, samplers = tokens.logprobs[tokens.sampled], tokens.sampler_logprobs[tokens.sampled]
    return {
        "policy/loss": (token_losses(tokens, params) * tokens.weights).sum().item() / divisor,
        "policy/clip_fraction": clipped.sum().item() / len(clipped),
        "policy/entropy": tokens.entropy.mean().item(),
        "policy/mismatch_kl": losses.k3(samplers, learners).sum().item() / len(learners),
        "policy/mismatch_mean": (learners - samplers).abs().mean().item(),
        "policy/mismatch_max": (learners - samplers).abs().max().item(),
    }
