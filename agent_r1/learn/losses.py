"""The policy's and the critic's losses: pure functions of tensors [N], one entry per token of a loss.

The caller selects the tokens with `MicroBatch.take`. A masked token is in no sum and no graph, so its gradient is
exactly zero even if its advantage or value is NaN. Sums are divided over the whole optimiser step, never over a
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Self

import torch
from torch import Tensor

from agent_r1.params.train import LARGEST_K3, LARGEST_LOG_RATIO, UpdateParams
from agent_r1.records import Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTokens:
    """The tokens in the policy loss. `logprobs` and `entropy` carry the gradient."""

    logprobs: Tensor  # [N] the learner's, nats
    entropy: Tensor  # [N] of the distribution that predicts the token, nats
    old_logprobs: Tensor  # [N] the denominators of the ratio, nats
    sampler_logprobs: Tensor  # [N] nats; at tokens that were not sampled, the learner's before the update
    importance: Tensor  # [N] from `importance_weights`; 1 without an importance cap
    reference_logprobs: Tensor  # [N] nats; 0 without a reference, and where not sampled
    advantages: Tensor  # [N]
    weights: Tensor  # [N] in the step's sum, from `token_weight`; 0 where a rank idles
    sampled: Tensor  # [N] bool, true at action tokens
    demonstrated: Tensor  # [N] bool, true at the tokens of a demonstration's actions
    balance: Tensor  # [N] of their micro-batch, from `balance`; carries the gradient too
    spans: list[int] | None  # lengths of the spans that share a ratio; None if every token has its own

    def detach(self) -> Self:
        """These tokens without a graph."""
        return replace(
            self, logprobs=self.logprobs.detach(), entropy=self.entropy.detach(), balance=self.balance.detach()
        )


def concatenate(pieces: Sequence[LossTokens]) -> LossTokens:
    """The tokens of several micro-batches as one."""
    names = [field.name for field in fields(LossTokens) if field.name != "spans"]
    joined = {name: torch.cat([getattr(piece, name) for piece in pieces]) for name in names}
    spans = None if pieces[0].spans is None else [span for piece in pieces for span in piece.spans or []]
    return LossTokens(**joined, spans=spans)


def token_losses(tokens: LossTokens, params: UpdateParams) -> Tensor:
    """[N] the loss of every token: the objective of `params.loss` plus KL to the reference minus entropy bonus.

    KL (by k3) and entropy are 0 at tokens that were not sampled. With an importance cap the objective is weighted for
    the mismatch of sampler and learner. At a demonstration's tokens it is -A logprob, without a ratio: supervised
    learning with the weight A. The balance of experts counts at all of them.
    """
    ratio = ratios(tokens, params)
    if params.loss == "clip":
        terms = clipped_policy_loss(ratio, tokens.advantages, params)
    else:
        terms = clipped_weight_loss(tokens.logprobs, ratio, tokens.advantages, params)
    if tokens.demonstrated.any():
        terms = torch.where(tokens.demonstrated, -tokens.advantages * tokens.logprobs, terms)
    if params.importance_cap:
        terms = terms * tokens.importance
    if params.kl_loss:
        terms = terms + params.kl_loss * tokens.sampled * k3(tokens.logprobs, tokens.reference_logprobs)
    if params.entropy_bonus:
        terms = terms - params.entropy_bonus * tokens.sampled * tokens.entropy
    if params.balance_loss:
        terms = terms + params.balance_loss * tokens.balance
    return terms


def balance(routers: Sequence[Tensor], count: int) -> Tensor:
    """The load-balancing loss of routers' logits [N, E], each of a layer that gives a token to `count` of E experts.

    It is E sum_e f_e P_e, with the share f_e of choices that fall on expert e and the mean P_e of its probability, as a
    mean over layers: 1 where they are even, E / `count` where all tokens go to the same. f_e has no gradient.

    Source: Switch Transformers (arXiv 2101.03961), Eq. 4 to 6.
    """
    layers = list[Tensor]()
    for logits in routers:
        probabilities = logits.softmax(-1, dtype=torch.float32)
        choices = probabilities.topk(count).indices.flatten()
        experts = logits.shape[1]
        shares = choices.bincount(minlength=experts) / len(choices)
        layers.append(experts * shares @ probabilities.mean(0))
    return torch.stack(layers).mean()


def means(steps: Sequence[Metrics]) -> Metrics:
    """The mean of each metric over the steps that have it."""
    metrics = [step for step in steps if step]
    columns = {name: [step[name] for step in metrics if name in step] for name in dict.fromkeys(chain(*metrics))}
    return {name: sum(values) / len(values) for name, values in columns.items()}


def token_weight(length: int, params: UpdateParams) -> float:
    """The weight of a loss token in the sum over an optimiser step; its trajectory has `length` of them."""
    return 1 / length if params.aggregation == "sequence_mean" and length else 1.0


def normaliser(lengths: Sequence[int], params: UpdateParams) -> int:
    """The divisor of the weighted sum over an optimiser step. A trajectory without loss tokens counts nowhere.

    `token_mean` divides by the tokens, `sequence_mean` by the trajectories, whose own means it adds up, and
    `constant_length` by the trajectories times a constant, which favours no length.

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
    """The metrics of one optimiser step, from its tokens with a gradient; `divisor` is the step's `normaliser`.

    The clip fraction is the share of its `acted` action tokens that `clipped_tokens` marks. A step of demonstrations
    alone has none, and no entropy.
    """
    metrics = {"policy/loss": (token_losses(tokens, params) * tokens.weights).sum().item() / divisor}
    if tokens.balance.any():
        metrics["policy/expert_balance"] = tokens.balance.mean().item()
    if tokens.demonstrated.any():
        metrics["policy/demonstration_loss"] = -tokens.logprobs[tokens.demonstrated].mean().item()
    if tokens.sampled.any():
        clipped = clipped_tokens(ratios(tokens, params), tokens.advantages, params)
        metrics["policy/clip_fraction"] = (clipped & tokens.sampled).sum().item() / acted
        metrics["policy/entropy"] = tokens.entropy[tokens.sampled].mean().item()
    if tokens.sampled.any() and params.importance_cap:
        weights = tokens.importance[tokens.sampled].double()
        metrics["policy/importance_masked"] = (weights == 0).double().mean().item()
        metrics["policy/importance_ess"] = effective_share(weights)
    return metrics


def mismatch_metrics(learners: Tensor, samplers: Tensor) -> Metrics:
    """The mismatch of learner and sampler at sampled tokens, from the logprobs [N] of both, in nats.

    With the importance weights w = learner's / sampler's probability, the effective sample size (sum w)^2 / sum w^2 is
    a share of N, and the mean of w^2 less 1 estimates the divergence chi^2(learner || sampler).

    Source: effective sample size: Kong 1992, as in Owen, Monte Carlo theory, methods and examples, §9.3.
    """
    difference = learners - samplers
    weights = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).double().exp()
    return {
        "policy/mismatch_kl": k3(samplers, learners).mean().item(),
        "policy/mismatch_mean": difference.abs().mean().item(),
        "policy/mismatch_max": difference.abs().max().item(),
        "policy/mismatch_ess": effective_share(weights),
        "policy/mismatch_chi2": weights.square().mean().item() - 1,
    }


def effective_share(weights: Tensor) -> float:
    """The effective sample size of weights [N] as a share of N; 0 if all are 0."""
    squares = weights.square().sum().item()
    return weights.sum().item() ** 2 / squares / len(weights) if squares else 0.0


def ratios(tokens: LossTokens, params: UpdateParams) -> Tensor:
    """[N] the ratios of `params.ratio`."""
    through_token = params.ratio == "sequence_token"
    return policy_ratio(tokens.logprobs, tokens.old_logprobs, tokens.spans, through_token=through_token)


def policy_ratio(
    logprobs: Tensor, old_logprobs: Tensor, spans: Sequence[int] | None = None, *, through_token: bool = False
) -> Tensor:
    """[N] the geometric mean of exp(logprob - old_logprob) over the span of each token.

    The lengths of the `spans` add up to N; None makes every token a span. A logarithm beyond 20 nats counts as 20 and
    has no gradient, so that no single token overflows a step. The gradient goes through the mean (GSPO, Eq. 5): tokens
    of a span share the effect of their advantages. `through_token` keeps the mean's value and takes the gradient
    through the token's own logprob alone (GSPO-token, Eq. 13 and 14).

    Source: tokens: PPO (arXiv 1707.06347), §3; sequences: GSPO (arXiv 2507.18071), Eq. 7; steps of an agent: StepPO
    (arXiv 2604.18401).
    """
    log_ratio = logprobs - old_logprobs
    if spans is not None:
        log_ratio = torch.cat([span.mean().expand_as(span) for span in log_ratio.split(list(spans))])
    if through_token:
        log_ratio = log_ratio.detach() + (logprobs - logprobs.detach())
    return torch.exp(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, params: UpdateParams) -> Tensor:
    """[N] PPO's clipped objective with separate bounds, to minimise, from ratios rho [N] and advantages A [N].

    max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)). For A < 0 it is at most -dual_clip A, unless dual_clip is 0:
    an action that has become likely again cannot dominate the step.

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

    A token beyond the bounds keeps the gradient of its logprob. Its weight alone is clipped, to
    [1 - clip_low, 1 + clip_high].

    Source: MiniMax-M1 (arXiv 2506.13585), Eq. 4 and 5, which sets no lower bound: clip_low 1.
    """
    weights = ratio.detach().clamp(1 - params.clip_low, 1 + params.clip_high)
    return -weights * advantages * logprobs


def clipped_tokens(ratio: Tensor, advantages: Tensor, params: UpdateParams) -> Tensor:
    """[N] true where a bound acts: it takes the gradient of `clipped_policy_loss` away, and clips that of CISPO.

    A token whose advantage is 0 has no gradient either way and is not clipped.
    """
    above = ratio > 1 + params.clip_high
    below = ratio < 1 - params.clip_low
    if params.loss == "cispo":
        return (advantages != 0) & (above | below)
    far_above = ratio > (params.dual_clip or math.inf)
    return ((advantages > 0) & above) | ((advantages < 0) & (below | far_above))


def importance_weights(log_ratio: Tensor, params: UpdateParams) -> Tensor:
    """[N] the weights of the sampler's tokens for the learner, of one trajectory.

    `log_ratio` [N] is the learner's logprob before the update less the sampler's, in nats. A weight is the token's own
    ratio, with `mask_sequence` the product of all, and with `mask_mean` their geometric mean, which does not grow with
    the length. The rule `cap` cuts it at `importance_cap`; the others make it 0 beyond `importance_floor` and the cap.

    Source: cap: truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (fengyao.notion.site/off-policy-rl); mask_token: IcePop, in Ring-1T (arXiv 2510.18855);
    mask_sequence, mask_mean: masked importance sampling and its geometric form, Liu et al. 2025, "When Speed Kills
    Stability" (richardli.xyz/rl-collapse).
    """
    if params.importance_rule == "cap":
        return torch.exp(log_ratio.clamp(max=math.log(params.importance_cap)))
    of_all = {"mask_sequence": log_ratio.sum(), "mask_mean": log_ratio.mean()}
    exponent = of_all.get(params.importance_rule, log_ratio).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    weights = exponent.exp().expand(len(log_ratio))
    return weights * ((weights >= params.importance_floor) & (weights <= params.importance_cap))


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """[N] an estimate of KL(p || q) in nats at each of the tokens that p drew; never negative.

    With x = log q - log p, `other_logprobs` less `logprobs`, it is exp(x) - 1 - x. An estimate beyond 10 counts as 10
    and has no gradient. Between sampler and learner it is 0 if both hold the same weights and compute alike. Before an
    update it measures numerical mismatch, or stale weights in the sampler.

    Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); as a loss: DeepSeekMath
    (arXiv 2402.03300), Eq. 4.
    """
    difference = (other_logprobs - logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return (torch.expm1(difference) - difference).clamp(max=LARGEST_K3)


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, value_clip: float) -> Tensor:
    """[N] PPO2's clipped value loss: max((V - T)^2, (clip(V, V_old - c, V_old + c) - T)^2) / 2.

    V [N] are the values of the critic being trained, V_old [N] those before the update, T [N] their targets.

    Source: OpenAI Baselines, ppo2/model.py (`vf_losses1`, `vf_losses2`).
    """
    near_old = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((values - targets) ** 2, (near_old - targets) ** 2)
