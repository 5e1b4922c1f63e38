"""The policy's and the critic's losses: pure functions of tensors [N], one entry per token of a loss.

The caller selects the tokens (`MicroBatch.take`), so a masked token is in no sum and in no graph: its gradient is
exactly zero whatever its advantage or value is, NaN included. Sums are divided over the whole optimiser step, never
over a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from agent_r1.params.update import LARGEST_K3_DIFFERENCE, LARGEST_LOG_RATIO, UpdateParams

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTokens:
    """The tokens that the policy loss runs over; `logprobs` and `entropy` carry the gradient."""

    logprobs: Tensor  # [N] the learner's, nats
    entropy: Tensor  # [N] of the distribution that predicts the token, nats
    old_logprobs: Tensor  # [N] the denominators of the ratio, nats
    sampler_logprobs: Tensor  # [N] nats; at tokens that were not sampled, the learner's own before the update
    reference_logprobs: Tensor  # [N] nats; 0 without a reference, and where not sampled
    advantages: Tensor  # [N]
    weights: Tensor  # [N] of the token in the step's sum, as `token_weight` has it
    sampled: Tensor  # [N] bool, true at action tokens
    spans: list[int] | None  # lengths of the spans that share a ratio; None where every token has its own

    @property
    def count(self) -> bool:
        """Whether they are part of the step, and not of what a rank does that has nothing left."""
        return bool(self.weights.any())

    def detach(self) -> Self:
        """These tokens without a graph."""
        return replace(self, logprobs=self.logprobs.detach(), entropy=self.entropy.detach())


def concatenate(pieces: Sequence[LossTokens]) -> LossTokens:
    """The tokens of several micro-batches as one."""
    names = [each.name for each in fields(LossTokens) if each.name != "spans"]
    joined = {name: torch.cat([getattr(piece, name) for piece in pieces]) for name in names}
    spans = None if pieces[0].spans is None else [span for piece in pieces for span in piece.spans or []]
    return LossTokens(**joined, spans=spans)


def token_losses(tokens: LossTokens, params: UpdateParams) -> Tensor:
    """[N] every token's loss: the objective of `params.loss`, the KL to the reference (k3), minus the entropy bonus.

    KL and entropy are of the policy's own choices: at tokens that were not sampled they are 0, whatever the loss mask.
    With an importance cap the objective is weighted for the mismatch of sampler and learner.
    """
    ratio = ratios(tokens, params)
    if params.loss == "clip":
        terms = clipped_policy_loss(ratio, tokens.advantages, params)
    else:
        terms = clipped_weight_loss(tokens.logprobs, ratio, tokens.advantages, params)
    if params.importance_cap:
        old, samplers = tokens.old_logprobs, tokens.sampler_logprobs
        terms = terms * importance_weights(old, samplers, cap=params.importance_cap)
    if params.kl_loss:
        terms = terms + params.kl_loss * tokens.sampled * k3(tokens.logprobs, tokens.reference_logprobs)
    if params.entropy_bonus:
        terms = terms - params.entropy_bonus * tokens.sampled * tokens.entropy
    return terms


def token_weight(length: int, params: UpdateParams) -> float:
    """What each loss token of a trajectory with `length` of them weighs in the sum over an optimiser step."""
    return 1 / length if params.aggregation == "sequence_mean" and length else 1.0


def normaliser(lengths: Sequence[int], params: UpdateParams) -> int:
    """What the weighted sum over an optimiser step is divided by; a trajectory without loss tokens counts nowhere.

    `token_mean` divides by the tokens; `sequence_mean` by the trajectories, each of which enters with its mean;
    `constant_length` by the trajectories times a constant, so that no length is favoured.

    Source: token_mean: DAPO (arXiv 2503.14476), Eq. 8; sequence_mean: DeepSeekMath (arXiv 2402.03300), Eq. 3;
    constant_length: Dr. GRPO (arXiv 2503.20783), §3.2.
    """
    trajectories = sum(length > 0 for length in lengths)
    return {
        "token_mean": sum(lengths),
        "sequence_mean": trajectories,
        "constant_length": trajectories * params.constant_length,
    }[params.aggregation]


def policy_metrics(tokens: LossTokens, params: UpdateParams, divisor: int, acted: int) -> Metrics:
    """The numbers of one optimiser step, from its tokens that have a gradient; `divisor` is the step's `normaliser`.

    Clipped are those of all its `acted` action tokens whose ratio is beyond a bound; where the advantage is 0 none is.
    """
    clipped = clipped_tokens(ratios(tokens, params), tokens.advantages, params)
    return {
        "policy/loss": (token_losses(tokens, params) * tokens.weights).sum().item() / divisor,
        "policy/clip_fraction": (clipped & tokens.sampled).sum().item() / acted,
        "policy/entropy": tokens.entropy[tokens.sampled].mean().item(),
    }


def mismatch_metrics(learners: Tensor, samplers: Tensor) -> Metrics:
    """How far learner and sampler are apart about the tokens that the sampler drew; logprobs [N] of both, in nats.

    With the importance weights w = learner's / sampler's probability, the effective sample size (sum w)^2 / sum w^2 is
    given as a share of N, and the mean of w^2 less 1 estimates the divergence chi^2(learner || sampler).

    Source: effective sample size: Kong 1992, as in Owen, Monte Carlo theory, methods and examples, §9.3.
    """
    difference = learners - samplers
    weights = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).double().exp()
    squares = weights.square()
    return {
        "policy/mismatch_kl": k3(samplers, learners).mean().item(),
        "policy/mismatch_mean": difference.abs().mean().item(),
        "policy/mismatch_max": difference.abs().max().item(),
        "policy/mismatch_ess": (weights.sum().square() / squares.sum()).item() / len(weights),
        "policy/mismatch_chi2": squares.mean().item() - 1,
    }


def ratios(tokens: LossTokens, params: UpdateParams) -> Tensor:
    """[N] the ratios that `params.ratio` asks for."""
    through_token = params.ratio == "sequence_token"
    return policy_ratio(tokens.logprobs, tokens.old_logprobs, tokens.spans, through_token=through_token)


def policy_ratio(
    logprobs: Tensor, old_logprobs: Tensor, spans: Sequence[int] | None = None, *, through_token: bool = False
) -> Tensor:
    """[N] how much likelier the tokens have become: the geometric mean of exp(logprob - old_logprob) over their span.

    The lengths of the `spans` add up to N; None takes every token for itself. A logarithm beyond 20 nats counts as 20
    and has no gradient, so that no single token overflows a step.

    Source: tokens: PPO (arXiv 1707.06347), §3; sequences: GSPO (arXiv 2507.18071), Eq. 7; steps of an agent: StepPO
    (arXiv 2604.18401). As in GSPO's Eq. 5 the gradient goes through the mean: where advantages differ within a span,
    its tokens share their effect. `through_token` keeps the mean's value and takes the gradient through the token's own
    logprob alone, as GSPO-token does (Eq. 13 and 14), so that every token answers for its own advantage.
    """
    log_ratio = logprobs - old_logprobs
    if spans is not None:
        log_ratio = torch.cat([span.mean().expand_as(span) for span in log_ratio.split(list(spans))])
    if through_token:
        log_ratio = log_ratio.detach() + (logprobs - logprobs.detach())
    return torch.exp(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, params: UpdateParams) -> Tensor:
    """[N] PPO's clipped objective with separate bounds, to minimise, from ratios rho [N] and advantages A [N].

    max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), and for A < 0 at most -dual_clip A where that is not 0, so
    that an action which has become likely again cannot dominate the step.

    Source: Schulman et al. 2017 (arXiv 1707.06347), Eq. 7; clip-higher: DAPO (arXiv 2503.14476), Eq. 10; the cap for
    A < 0: dual-clip PPO, Ye et al. 2020 (arXiv 1912.09729), Eq. 5.
    """
    clipped = ratio.clamp(1 - params.clip_low, 1 + params.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if not params.dual_clip:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -params.dual_clip * advantages), loss)


def clipped_weight_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, params: UpdateParams) -> Tensor:
    """[N] CISPO's objective, to minimise: -A logprob, weighted by the clipped ratio, which has no gradient.

    A token beyond the bounds keeps the gradient of its logprob; only its weight is clipped, into
    [1 - clip_low, 1 + clip_high].

    Source: MiniMax-M1 (arXiv 2506.13585), Eq. 4 and 5, which sets no lower bound: clip_low 1.
    """
    weights = ratio.detach().clamp(1 - params.clip_low, 1 + params.clip_high)
    return -weights * advantages * logprobs


def clipped_tokens(ratio: Tensor, advantages: Tensor, params: UpdateParams) -> Tensor:
    """[N] true where a bound acts: `clipped_policy_loss` then has no gradient, `clipped_weight_loss` a smaller one.

    A token whose advantage is 0 has no gradient either way and is not clipped.
    """
    above, below = ratio > 1 + params.clip_high, ratio < 1 - params.clip_low
    if params.loss == "cispo":
        return (advantages != 0) & (above | below)
    far_above = ratio > (params.dual_clip or math.inf)
    return ((advantages > 0) & above) | ((advantages < 0) & (below | far_above))


def importance_weights(logprobs: Tensor, sampler_logprobs: Tensor, *, cap: float) -> Tensor:
    """[N] min(exp(logprob - sampler_logprob), cap): what a token drawn by the sampler counts for the learner.

    Both logprobs [N] are in nats: the learner's before the update, and the sampler's, recorded with the tokens.

    Source: truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (fengyao.notion.site/off-policy-rl).
    """
    return torch.exp((logprobs - sampler_logprobs).clamp(max=math.log(cap)))


def k3(logprobs: Tensor, others: Tensor) -> Tensor:
    """[N] an estimate of KL(p || q) in nats at each of the tokens that p drew; never negative.

    With x = log q - log p, `others` less `logprobs`, it is exp(x) - 1 - x; an x beyond 10 counts as 10 and has no
    gradient. Between sampler and learner it is 0 where both hold the same weights and compute alike; before an update
    it measures numerical mismatch, or stale weights in the sampler.

    Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); as a loss: DeepSeekMath
    (arXiv 2402.03300), Eq. 4.
    """
    difference = (others - logprobs).clamp(-LARGEST_K3_DIFFERENCE, LARGEST_K3_DIFFERENCE)
    return torch.expm1(difference) - difference


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, value_clip: float) -> Tensor:
    """[N] PPO2's clipped value loss: max((V - T)^2, (clip(V, V_old - c, V_old + c) - T)^2) / 2.

    V [N] are the values of the critic being trained, V_old [N] those before the update, T [N] their targets.

    Source: OpenAI Baselines, ppo2/model.py (`vf_losses1`, `vf_losses2`).
    """
    near_old = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((values - targets) ** 2, (near_old - targets) ** 2)
