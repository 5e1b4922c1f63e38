"""The gradient of the policy loss as a vector: how far and which way one optimiser step would want to go.

Legend for shapes: N = loss tokens of a micro-batch, P = trainable weights of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.params import UpdateParams
from agent_r1.policy.objective import Metrics, Tokens, concatenate, normaliser, policy_metrics, token_losses
from agent_r1.policy.passes import make_rows, policy_pass
from agent_r1.policy.scoring import Compute
from agent_r1.records import Credit, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradient:
    """The policy loss of some trajectories as a single optimiser step, before the optimiser and any clipping.

    The gradient comes in two parts that add up: through the probabilities of the tokens that the policy sampled, and
    through those of all other tokens that the loss runs over.
    """

    sampled: Tensor  # [P] float32, on the CPU
    observed: Tensor  # [P] float32, on the CPU; 0 with the loss mask on
    metrics: Metrics  # of the step, as training logs them; none where no token is trained on
    observed_loss_share: float  # of the sum of the tokens' absolute losses; 0 where that is 0

    @property
    def total(self) -> Tensor:
        """[P] what the optimiser would be given."""
        return self.sampled + self.observed

    @property
    def observed_share(self) -> float:
        """Of the parts' squared norms, in [0, 1]; 0 for a gradient of 0."""
        sampled, observed = (part.double().square().sum().item() for part in (self.sampled, self.observed))
        return observed / (sampled + observed) if sampled + observed else 0.0


def policy_gradient(
    policy: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    credits: Sequence[Credit],
    params: UpdateParams,
    compute: Compute,
) -> PolicyGradient:
    """The gradient of all kept trajectories together, in one step, whatever `epochs` and `minibatches` say.

    No weight changes, and nothing is left in the parameters' own gradients.

    Raises:
        FloatingPointError: a loss is not finite; names the trajectories.
        ValueError: `kl_loss` is above 0 and the credits were assigned without a reference.
    """
    rows = make_rows(policy, trajectories, credits, params, compute)  # those not kept have no loss token
    divisor = normaliser([row.loss_tokens for row in rows], params)
    weights = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    sampled, observed = torch.zeros(2, sum(weight.numel() for weight in weights))
    seen: list[Tokens] = []
    for tokens, _ in policy_pass(policy, rows, params, compute, learn=True):
        for part, total in ((tokens.sampled, sampled), (~tokens.sampled, observed)):
            if part.any():
                loss = (token_losses(_only(tokens, part), params) * tokens.weights).sum() / divisor
                total += _flat(torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True))
        seen.append(tokens.detach())
    step = concatenate(seen) if seen else None
    return PolicyGradient(
        sampled=sampled,
        observed=observed,
        metrics=policy_metrics(step, params, divisor) if step else {},
        observed_loss_share=_observed_loss_share(step, params) if step else 0.0,
    )


def cosine(one: Tensor, other: Tensor) -> float:
    """The cosine of the angle between two vectors [P]; NaN where one of them is 0 and has no direction."""
    one, other = one.double(), other.double()
    return float((one @ other / (one.norm() * other.norm())).item())


def gradient_metrics(gradient: PolicyGradient, other: PolicyGradient) -> Metrics:
    """The numbers of a gradient, and its cosine with another one of the same policy."""
    return {
        **gradient.metrics,
        "policy/grad_norm": gradient.total.double().norm().item(),
        "policy/observed_loss_share": gradient.observed_loss_share,
        "policy/observed_gradient_share": gradient.observed_share,
        "policy/gradient_cosine": cosine(gradient.total, other.total),
    }


def _only(tokens: Tokens, part: Tensor) -> Tokens:
    """The same tokens with a graph at those of `part` [N] alone: tokens of one span share a ratio, not a gradient."""
    return replace(
        tokens,
        logprobs=torch.where(part, tokens.logprobs, tokens.logprobs.detach()),
        entropy=torch.where(part, tokens.entropy, tokens.entropy.detach()),
    )


def _flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients]).cpu()


def _observed_loss_share(tokens: Tokens, params: UpdateParams) -> float:
    sizes = (token_losses(tokens, params) * tokens.weights).abs().double()
    total = sizes.sum().item()
    return sizes[~tokens.sampled].sum().item() / total if total else 0.0
