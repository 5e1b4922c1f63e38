"""The agreement of two credits of the same trajectories, in advantages and in gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.credit.batch import after_prompt, token_rewards
from agent_r1.credit.rewards import step_rewards
from agent_r1.learn.gradients import join_credit, policy_pass
from agent_r1.learn.losses import (
    LossTokens,
    Metrics,
    concatenate,
    mismatch_metrics,
    normaliser,
    policy_metrics,
    token_losses,
)
from agent_r1.learn.scoring import Compute
from agent_r1.params.credit import CreditParams
from agent_r1.params.update import UpdateParams
from agent_r1.records import Credit, Trajectory


def advantage_comparison(
    trajectories: Sequence[Trajectory], credits_: Sequence[Credit], others: Sequence[Credit]
) -> dict[str, float]:
    """The share of tokens with an advantage, and the agreement with other credits of the same trajectories.

    Returns:
        `advantage/kept_share`: the share of kept trajectories.
        `advantage/nonzero_share`: a share of the tokens after the first prompt of all trajectories, kept or not.
        `advantage/correlation`: Pearson's, at the action tokens of the trajectories that both keep; NaN without such
        tokens, or if one side is constant.
    """
    after = np.concatenate([after_prompt(trajectory.source) for trajectory in trajectories])
    rows = zip(trajectories, credits_, others, strict=True)
    acting = np.concatenate([t.action_mask & one.kept & other.kept for t, one, other in rows])
    ours, theirs = (np.concatenate([row.advantages for row in each], dtype=np.float64) for each in (credits_, others))
    varied = acting.any() and ours[acting].std() and theirs[acting].std()
    return {
        "advantage/kept_share": float(np.mean([credit.kept for credit in credits_])),
        "advantage/nonzero_share": float(np.mean(ours[after] != 0)),
        "advantage/correlation": float(np.corrcoef(ours[acting], theirs[acting])[0, 1]) if varied else math.nan,
    }


def value_errors(
    trajectories: Sequence[Trajectory], credits_: Sequence[Credit], params: CreditParams, max_tokens: int | None = None
) -> dict[str, float]:
    """The errors of the kept trajectories' values against the undiscounted return to go.

    Returns:
        For action and observation tokens: `value/<tokens>_rmse`, and `value/<tokens>_std` of that return, the error
        of the best constant. A kind of token that does not occur is left out.
    """
    kept = [(t, credit) for t, credit in zip(trajectories, credits_, strict=True) if credit.kept]
    if not kept:
        return {}
    values = np.concatenate([credit.values for _, credit in kept])
    to_come = np.concatenate([returns_to_come(trajectory, params, max_tokens) for trajectory, _ in kept])
    acted = np.concatenate([trajectory.action_mask for trajectory, _ in kept])
    read = np.concatenate([after_prompt(trajectory.source) for trajectory, _ in kept]) & ~acted
    errors: dict[str, float] = {}
    for name, chosen in (("action", acted), ("observation", read)):
        if chosen.any():
            target = to_come[chosen]
            errors[f"value/{name}_rmse"] = float(np.sqrt(np.mean((values[chosen] - target) ** 2)))
            errors[f"value/{name}_std"] = float(target.std())
    return errors


def returns_to_come(trajectory: Trajectory, params: CreditParams, max_tokens: int | None = None) -> NDArray[np.float64]:
    """[L] the undiscounted sum of the rewards at a token and after it."""
    rewards = token_rewards(trajectory, step_rewards(trajectory, params, max_tokens)[0])
    return np.cumsum(rewards[::-1])[::-1]


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """The gradient of some trajectories' policy loss as one optimiser step, before clipping and the optimiser.

    It is the sum of two parts: through the probabilities of sampled tokens, and of all other tokens in the loss.
    """

    sampled: Tensor  # [P] float32, on the CPU
    observed: Tensor  # [P] float32, on the CPU; 0 with the loss mask on
    metrics: Metrics  # of the step, as training logs them; empty if no token is trained on
    observed_loss_share: float  # of the sum of the tokens' absolute losses; 0 if that is 0

    @property
    def total(self) -> Tensor:
        """[P] the gradient that the optimiser would get."""
        return self.sampled + self.observed

    @property
    def observed_share(self) -> float:
        """The observed part's share of both squared norms, in [0, 1]; 0 for a gradient of 0."""
        sampled, observed = (part.double().square().sum().item() for part in (self.sampled, self.observed))
        return observed / (sampled + observed) if sampled + observed else 0.0

    def compared_with(self, other: PolicyGradient) -> Metrics:
        """The metrics of this gradient, and its cosine with another one of the same policy."""
        return {
            **self.metrics,
            "policy/grad_norm": self.total.double().norm().item(),
            "policy/observed_loss_share": self.observed_loss_share,
            "policy/observed_gradient_share": self.observed_share,
            "policy/gradient_cosine": cosine(self.total, other.total),
        }


def policy_gradient(
    policy: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    credits: Sequence[Credit],
    params: UpdateParams,
    compute: Compute,
) -> PolicyGradient:
    """The gradient of all kept trajectories in one step; `epochs` and `minibatches` have no effect.

    P counts the trainable weights: with adapters only theirs. Runs in micro-batches, changes no weight, and leaves the
    parameters' own gradients empty. Raises FloatingPointError, which names the trajectories, if a loss is not finite,
    and ValueError if `kl_loss` needs a reference that the credits lack.
    """
    rows = join_credit(policy, trajectories, credits, params, compute)  # those not kept have no loss token
    divisor = normaliser([row.loss_tokens for row in rows], params)
    weights = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    sampled, observed = torch.zeros(2, sum(weight.numel() for weight in weights))
    seen: list[LossTokens] = []
    for tokens, _ in policy_pass(policy, rows, params, compute, learn=True, whole=True):
        for part, total in ((tokens.sampled, sampled), (~tokens.sampled, observed)):
            if part.any():
                loss = (token_losses(_only(tokens, part), params) * tokens.weights).sum() / divisor
                gradients = torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
                for piece, each in zip(total.split([each.numel() for each in gradients]), gradients, strict=True):
                    piece += each.flatten().cpu()
        seen.append(tokens.detach())
    if not seen:
        return PolicyGradient(sampled, observed, {}, 0.0)
    step = concatenate(seen)
    acting = step.sampled
    metrics = policy_metrics(step, params, divisor, int(acting.sum()))
    metrics |= mismatch_metrics(step.logprobs[acting], step.sampler_logprobs[acting])
    return PolicyGradient(sampled, observed, metrics, _observed_loss_share(step, params))


def cosine(one: Tensor, other: Tensor) -> float:
    """The cosine of the angle between two vectors [P]; NaN if one of them is 0."""
    one, other = one.double(), other.double()
    return float((one @ other / (one.norm() * other.norm())).item())


def _only(tokens: LossTokens, part: Tensor) -> LossTokens:
    """Cuts the graph of all tokens outside `part` [N]. Tokens of one span share a ratio, not a gradient."""
    logprobs, entropy = (torch.where(part, each, each.detach()) for each in (tokens.logprobs, tokens.entropy))
    return replace(tokens, logprobs=logprobs, entropy=entropy)


def _observed_loss_share(tokens: LossTokens, params: UpdateParams) -> float:
    sizes = (token_losses(tokens, params) * tokens.weights).abs().double()
    total = sizes.sum().item()
    return sizes[~tokens.sampled].sum().item() / total if total else 0.0
