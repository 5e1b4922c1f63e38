"""The gradients of one optimiser step, added up micro-batch by micro-batch, and what is measured while they are."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from agent_r1.learn import losses
from agent_r1.learn.batching import Compute, micro_batches, score_logprobs
from agent_r1.learn.losses import LossTokens, Metrics
from agent_r1.learn.model import Critic, precision
from agent_r1.learn.rows import CreditedTrajectory, not_finite_in, policy_pass, require_none
from agent_r1.params.update import CriticParams, UpdateParams


def add_policy_gradient(
    policy: PreTrainedModel,
    rows: Sequence[CreditedTrajectory],
    divisor: int,
    params: UpdateParams,
    compute: Compute,
    *,
    learn: bool,
) -> LossTokens:
    """Adds up the policy's gradient of a loss that is divided by `divisor`, or only looks; returns the loss's tokens.

    Raises FloatingPointError if a loss is not finite.
    """
    seen: list[LossTokens] = []
    for tokens, terms in policy_pass(policy, rows, params, compute, learn=learn):
        if learn:
            ((terms * tokens.weights).sum() / divisor).backward()
        if tokens.count:
            seen.append(tokens.detach())
    return losses.concatenate(compute.ranks.gather(seen))


def mismatch(
    policy: PreTrainedModel,
    rows: Sequence[CreditedTrajectory],
    seen: LossTokens,
    params: UpdateParams,
    compute: Compute,
) -> Metrics:
    """How far sampler and learner are apart about all action tokens of a step.

    Those that its loss has `seen` are known; the others take a pass of their own.
    """
    trajectories = [row.trajectory for row in rows]
    unseen = [row.trajectory.action_mask & ~(row.credit.loss_mask & row.has_gradient(params)) for row in rows]
    own = score_logprobs(policy, trajectories, unseen, compute)
    pairs = [(seen.logprobs[seen.sampled].cpu().numpy(), seen.sampler_logprobs[seen.sampled].cpu().numpy())]
    pairs += [(ours[mask], each.logprobs[mask]) for ours, each, mask in zip(own, trajectories, unseen, strict=True)]
    learners, samplers = (torch.from_numpy(np.concatenate(each)) for each in zip(*pairs, strict=True))
    return losses.mismatch_metrics(learners, samplers)


def add_critic_gradient(
    critic: Critic, rows: Sequence[CreditedTrajectory], tokens: int, params: CriticParams, compute: Compute
) -> float:
    """Adds up the critic's gradient of a loss over `tokens` tokens; returns the loss. Raises as the policy's."""
    found, culprits = list[float](), set[str]()
    trajectories, masks = [row.trajectory for row in rows], [row.credit.critic_mask for row in rows]
    for batch in micro_batches(trajectories, masks, compute):
        with precision(compute.device, compute.dtype):
            values = critic(batch.ids, batch.mask)
        old_values = batch.take([row.credit.values for row in rows])
        targets = batch.take([row.credit.value_targets for row in rows])
        terms = losses.clipped_value_loss(values, old_values, targets, value_clip=params.value_clip)
        culprits |= not_finite_in(batch, trajectories, terms, old_values)
        loss = terms.sum() * (not batch.idle) / tokens
        loss.backward()
        found.append(loss.item())
    require_none("critic loss", culprits, compute)
    return functools.reduce(operator.add, compute.ranks.gather(found), 0.0)  # in this order, whatever `sum` does
