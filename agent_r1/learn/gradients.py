"""The gradients of one optimiser step, accumulated over the micro-batches of trajectories with their credit."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.learn import losses
from agent_r1.learn.losses import LossTokens
from agent_r1.learn.model import Critic, precision
from agent_r1.learn.scoring import Compute, MicroBatch, micro_batches, output_of, score_logprobs
from agent_r1.params.train import CriticParams, UpdateParams
from agent_r1.records import Credit, Floats32, Mask, Metrics, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditedTrajectory:
    """A trajectory of an update."""

    trajectory: Trajectory
    credit: Credit
    sampler_logprobs: Floats32  # [L] nats; at tokens that were not sampled, the learner's before the update
    old_logprobs: Floats32  # [L] nats; `sampler_logprobs`, or with an importance cap the learner's
    importance: Floats32  # [L] of its loss tokens, from `losses.importance_weights`; 1 without an importance cap
    spans: list[int] | None  # loss tokens of each span that shares a ratio; None where every token has its own
    weights: Floats32  # [L] of its loss tokens in the step's sum

    @property
    def loss_tokens(self) -> int:
        """The number of tokens in the policy loss."""
        return int(self.credit.loss_mask.sum())

    def has_gradient(self, params: UpdateParams) -> bool:
        """Whether a loss depends on the weights. A trajectory without such a loss can be skipped."""
        credit = self.credit
        regularised = params.regularised and credit.loss_mask.any()
        return bool(regularised or credit.advantages[credit.loss_mask].any() or credit.critic_mask.any())


def join_credit(
    policy: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    credits: Sequence[Credit],
    params: UpdateParams,
    compute: Compute,
) -> list[CreditedTrajectory]:
    """Joins trajectories with their credits, and has the policy score the tokens that `asked_of_learner` selects.

    A ValueError refuses a `kl_loss` above 0 if the credits were assigned without a reference.
    """
    in_loss = [credit for credit in credits if credit.loss_mask.any()]
    if params.kl_loss and in_loss and not any(credit.reference_logprobs.any() for credit in in_loss):
        raise ValueError(
            f"kl_loss {params.kl_loss} needs a reference, and the credits hold no logprobs of one; "
            "assign credit with a reference, or set kl_loss: 0"
        )
    pairs = list(zip(trajectories, credits, strict=True))
    masks = [asked_of_learner(*pair, params) for pair in pairs]
    logprobs = score_logprobs(policy, trajectories, masks, compute)
    return [credited(*pair, learner_logprobs, params) for pair, learner_logprobs in zip(pairs, logprobs, strict=True)]


def asked_of_learner(trajectory: Trajectory, credit: Credit, params: UpdateParams) -> Mask:
    """[L] the loss tokens that need the learner's logprob before the update: not sampled ones, or all with a cap."""
    by_learner = np.ones_like(credit.loss_mask) if params.importance_cap else ~trajectory.action_mask
    return credit.kept & credit.loss_mask & by_learner


def credited(
    trajectory: Trajectory, credit: Credit, learner_logprobs: Floats32, params: UpdateParams
) -> CreditedTrajectory:
    """Joins a trajectory with its credit. `learner_logprobs` [L] are of before the update, where a loss needs them."""
    if trajectory.trajectory_id != credit.trajectory_id:
        raise ValueError(f"trajectory {trajectory.trajectory_id!r} came with the credit of {credit.trajectory_id!r}")
    samplers = np.where(trajectory.action_mask, trajectory.logprobs, learner_logprobs)
    weight = losses.token_weight(int(credit.loss_mask.sum()), params)
    importance = np.ones_like(learner_logprobs)
    if params.importance_cap:
        log_ratio = torch.from_numpy((learner_logprobs - samplers)[credit.loss_mask])
        importance[credit.loss_mask] = losses.importance_weights(log_ratio, params).numpy()
    return CreditedTrajectory(
        trajectory=trajectory,
        credit=credit,
        sampler_logprobs=samplers,
        old_logprobs=learner_logprobs if params.importance_cap else samplers,
        importance=importance,
        spans=span_lengths(trajectory, credit.loss_mask, params),
        weights=np.full(len(learner_logprobs), weight, np.float32),
    )


def span_lengths(trajectory: Trajectory, loss_mask: Mask, params: UpdateParams) -> list[int] | None:
    """The loss tokens of each span of `params.ratio`, None for single ones. A step reaches up to the next action."""
    if params.ratio == "token":
        return None
    if params.ratio != "step":
        return [int(loss_mask.sum())]
    starts = [step.action_start for step in trajectory.steps]
    step_of_token = np.searchsorted(starts, np.flatnonzero(loss_mask), side="right")
    lengths: list[int] = np.unique(step_of_token, return_counts=True)[1].tolist()
    return lengths


def policy_pass(
    policy: PreTrainedModel,
    rows: Sequence[CreditedTrajectory],
    params: UpdateParams,
    compute: Compute,
    *,
    learn: bool,
    whole: bool = False,
) -> Iterator[tuple[LossTokens, Tensor]]:
    """Yields the loss tokens and their losses [N] of one part of a micro-batch after the other.

    To `learn`, call backward on each part's loss before asking for the next part. The backbone gets its gradients after
    the last part of a micro-batch. Tokens that share a ratio are in one part; `whole` makes one part of each
    micro-batch. Raises FloatingPointError if a loss is not finite.
    """
    trajectories = [row.trajectory for row in rows]
    culprits = set[str]()
    for batch in micro_batches(trajectories, [row.credit.loss_mask for row in rows], compute):
        compute.ranks.reduce(policy, last=batch.last)
        with torch.set_grad_enabled(learn), precision(compute.device, compute.dtype):
            output = output_of(policy, batch.ids, batch.mask, compute.ranks.backbone(policy))
        parts = [output] if whole or params.ratio != "token" else output.cut()
        exact_sum = _exact_sum(policy.get_output_embeddings().weight, len(parts)) if learn else None
        for piece, part in zip(batch.cut([len(part.chosen) for part in parts]), parts, strict=True):
            with torch.set_grad_enabled(learn), precision(compute.device, compute.dtype):
                tokens = loss_tokens(piece, rows, *part.scores(entropy=True), part.balance, params)
            terms = losses.token_losses(tokens, params)
            culprits |= not_finite_in(piece, trajectories, terms, tokens.logprobs - tokens.old_logprobs)
            yield tokens, terms
            if exact_sum:
                exact_sum.take()
        if exact_sum:
            exact_sum.give()
        if learn:
            output.join(parts)
    compute.ranks.let_go(policy)
    require_none("policy loss", culprits, compute)


def _exact_sum(weight: Tensor, parts: int) -> _ExactSum | None:
    """The sum of a weight's gradients over the parts of a micro-batch, where each part would round it."""
    rounds = parts > 1 and weight.requires_grad and weight.dtype is not torch.float32
    return _ExactSum(weight) if rounds else None


class _ExactSum:
    """The sum of a weight's gradients, in float32 until the last one came."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._total = torch.zeros_like(weight, dtype=torch.float32)

    def take(self) -> None:
        """Takes the weight's gradient away, and adds it to the sum."""
        if self._weight.grad is not None:
            self._total += self._weight.grad
        self._weight.grad = None

    def give(self) -> None:
        """Gives the weight the sum for its gradient."""
        self._weight.grad = self._total.to(self._weight.dtype)


def loss_tokens(
    batch: MicroBatch,
    rows: Sequence[CreditedTrajectory],
    logprobs: Tensor,
    entropy: Tensor,
    balance: Tensor,
    params: UpdateParams,
) -> LossTokens:
    """The loss tokens of a micro-batch, with the learner's logprobs [N] and entropy [N], and the balance of experts."""
    batch_rows = [rows[row] for row in batch.rows]
    return LossTokens(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=batch.take([row.old_logprobs for row in rows]),
        sampler_logprobs=batch.take([row.sampler_logprobs for row in rows]),
        importance=batch.take([row.importance for row in rows]),
        reference_logprobs=batch.take([row.credit.reference_logprobs for row in rows]),
        advantages=batch.take([row.credit.advantages for row in rows]),
        weights=batch.take([row.weights for row in rows]) * (not batch.idle),
        sampled=batch.take([row.trajectory.action_mask for row in rows]),
        demonstrated=batch.take([row.trajectory.demonstration_mask for row in rows]),
        balance=balance.expand(len(logprobs)),
        spans=None if params.ratio == "token" else [span for row in batch_rows for span in row.spans or []],
    )


def not_finite_in(batch: MicroBatch, trajectories: Sequence[Trajectory], *terms: Tensor) -> set[str]:
    """The ids of the trajectories in which one of a loss's terms [N] is not finite."""
    return {
        trajectories[row].trajectory_id
        for term in terms
        if not term.isfinite().all()
        for row, piece in zip(batch.rows, batch.split(term), strict=True)
        if not piece.isfinite().all()
    }


def require_none(name: str, culprits: set[str], compute: Compute) -> None:
    """Raises FloatingPointError on every rank if any rank found a loss that is not finite."""
    if trajectory_ids := sorted({*compute.ranks.gather([*culprits])}):
        raise not_finite(name, trajectory_ids)


def not_finite(name: str, trajectory_ids: Sequence[str]) -> FloatingPointError:
    """The error of an optimiser step in whose trajectories a number is not finite."""
    return FloatingPointError(
        f"the {name} is not finite in trajectories {', '.join(trajectory_ids)}; their optimiser step was not taken: "
        "look at their rewards and advantages, or lower the learning rate and start again from the checkpoint"
    )


def add_policy_gradient(
    policy: PreTrainedModel,
    rows: Sequence[CreditedTrajectory],
    divisor: int,
    params: UpdateParams,
    compute: Compute,
    *,
    learn: bool,
) -> LossTokens:
    """The tokens of a loss, which `divisor` divides; accumulates its gradient, scaled, to `learn`.

    Raises as `policy_pass`.
    """
    pieces = list[LossTokens]()
    for tokens, terms in policy_pass(policy, rows, params, compute, learn=learn):
        if learn:
            ((terms * tokens.weights).sum() / divisor * compute.scale).backward()
        if tokens.weights.any():  # false where a rank idles
            pieces.append(tokens.detach())
    return losses.concatenate(compute.ranks.gather(pieces, LossTokens))


def mismatch(
    policy: PreTrainedModel,
    rows: Sequence[CreditedTrajectory],
    tokens: LossTokens,
    params: UpdateParams,
    compute: Compute,
) -> Metrics:
    """The mismatch of sampler and learner over a step's action tokens; those not in `tokens` take a further pass."""
    trajectories = [row.trajectory for row in rows]
    unseen = [row.trajectory.action_mask & ~(row.credit.loss_mask & row.has_gradient(params)) for row in rows]
    learners = [tokens.logprobs[tokens.sampled].cpu().numpy()]
    samplers = [tokens.sampler_logprobs[tokens.sampled].cpu().numpy()]
    scores = score_logprobs(policy, trajectories, unseen, compute)
    for trajectory, mask, logprobs in zip(trajectories, unseen, scores, strict=True):
        learners.append(logprobs[mask])
        samplers.append(trajectory.logprobs[mask])
    return losses.mismatch_metrics(*(torch.from_numpy(np.concatenate(pieces)) for pieces in (learners, samplers)))


def add_critic_gradient(
    critic: Critic, rows: Sequence[CreditedTrajectory], tokens: int, params: CriticParams, compute: Compute
) -> float:
    """Accumulates the critic's gradient, scaled, of a loss over `tokens` tokens; returns the loss.

    Raises as `policy_pass`.
    """
    batch_losses = list[float]()
    culprits = set[str]()
    trajectories = [row.trajectory for row in rows]
    masks = [row.credit.critic_mask for row in rows]
    for batch in micro_batches(trajectories, masks, compute):
        compute.ranks.reduce(critic, last=batch.last)
        with precision(compute.device, compute.dtype):
            values = critic(batch.ids, batch.mask)
        old_values = batch.take([row.credit.values for row in rows])
        targets = batch.take([row.credit.value_targets for row in rows])
        terms = losses.clipped_value_loss(values, old_values, targets, value_clip=params.value_clip)
        culprits |= not_finite_in(batch, trajectories, terms, old_values)
        loss = terms.sum() * (not batch.idle) / tokens
        (loss * compute.scale).backward()
        batch_losses.append(loss.item())
    require_none("critic loss", culprits, compute)
    return functools.reduce(operator.add, compute.ranks.gather(batch_losses), 0.0)  # in this order, unlike `sum`
