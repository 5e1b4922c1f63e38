"""The learner: policy and critic, and the optimiser steps that make them better."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from agent_r1.params import UpdateParams
from agent_r1.policy import losses
from agent_r1.policy.batching import MicroBatch, batches, minibatches
from agent_r1.policy.critic import Critic
from agent_r1.policy.model import (
    DtypeName,
    chosen_logprobs,
    compute_dtype,
    default_device,
    load_policy,
    load_tokenizer,
    precision,
    selected_logits,
    token_logprobs,
)
from agent_r1.records import Credit, Trajectory

Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]
Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One trajectory as an update sees it; L = its tokens."""

    trajectory: Trajectory
    credit: Credit
    old_logprobs: Floats  # [L] the sampler's at action tokens, the learner's own before the update at others


class PolicyTokens(NamedTuple):
    """What the policy loss of some tokens is made of; N = tokens."""

    logprobs: Tensor  # [N] the learner's, nats, detached
    old_logprobs: Tensor  # [N] nats
    advantages: Tensor  # [N]
    sampled: Tensor  # [N] true at action tokens
    entropy: Tensor  # [N] of the distribution the token was drawn from, nats


class Learner:
    """Holds the policy, the critic where the estimator needs one, and their optimisers.

    Weights are float32; with a compute dtype of bfloat16 the matrix products run in it. Nothing here draws random
    numbers: the order of the trajectories follows from (seed, iteration, epoch).
    """

    def __init__(
        self,
        path: str | Path,
        params: UpdateParams,
        *,
        with_critic: bool,
        seed: int,
        dtype: DtypeName = "auto",
        device: torch.device | None = None,
    ) -> None:
        """Starts from a Hugging Face folder or hub id, on the accelerator where there is one.

        Raises:
            ValueError: no model, tokenizer or chat template at `path`.
        """
        self.params = params
        self.seed = seed
        self.policy_version = 0  # updates of the policy's weights since `path`
        self.device = device or default_device()
        self.dtype = compute_dtype(dtype, self.device)
        self.tokenizer = load_tokenizer(path)
        self.policy = load_policy(path, device=self.device)
        self.critic = Critic(path, self.device) if with_critic else None
        self.policy_optimizer = _adamw(self.policy, params.learning_rate)
        self.critic_optimizer = _adamw(self.critic, params.critic_learning_rate) if self.critic else None

    def values(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """The critic's value [L] of the state before each token, 0 at the first; all 0 without a critic."""
        critic = self.critic
        if critic is None:
            return [np.zeros(len(each.token_ids), np.float32) for each in trajectories]
        everywhere = [np.ones(len(each.token_ids), np.bool_) for each in trajectories]
        return self._scores(lambda ids, mask: critic(ids)[mask], trajectories, everywhere)

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """The learner's own logprob [L] of every token in nats, 0 at the first, which nothing predicts."""
        return self._logprobs_at(trajectories, [np.arange(len(each.token_ids)) > 0 for each in trajectories])

    def update(self, trajectories: Sequence[Trajectory], credits: Sequence[Credit], iteration: int) -> Metrics:
        """Trains on one iteration's trajectories: `epochs` passes of `minibatches` optimiser steps.

        The first `critic_warmup_iterations` train the critic alone. Trajectories that are not kept have no influence:
        the minibatches are formed without them. Those that are kept and have no gradient to give cost nothing, yet
        count in the denominators of the losses.

        Returns:
            Means over the optimiser steps, except that the mismatch of sampler and learner is the first step's: only
            that one runs before any weight changes. A step without a gradient changes nothing and is left out.

        Raises:
            FloatingPointError: a loss or gradient is not finite; the step that found it changed no weight.
        """
        rows = [row for row in self._rows(trajectories, credits) if row.credit.kept]
        trains_policy = self.critic is None or iteration >= self.params.critic_warmup_iterations
        steps = [
            self._step([rows[index] for index in chosen], trains_policy)
            for epoch in range(self.params.epochs if rows else 0)
            for chosen in minibatches(
                len(rows), self.params.minibatches, seed=self.seed, iteration=iteration, epoch=epoch
            )
        ]
        self.policy_version += trains_policy
        teaching = [row for row in rows if _has_gradient(row)]
        return _summary(steps) | {
            "policy/kept_share": len(teaching) / len(trajectories),
            "update/tokens": float(self.params.epochs * sum(len(row.trajectory.token_ids) for row in teaching)),
        }

    def save_policy(self, folder: Path) -> None:
        """Writes policy and tokenizer as an ordinary Hugging Face folder."""
        self.policy.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def state(self) -> dict[str, Any]:
        """What a learner needs to go on besides the policy's weights; the process's random states included."""
        return {
            "policy_version": self.policy_version,
            "policy_optimizer": self.policy_optimizer.state_dict(),
            "critic": self.critic.state_dict() if self.critic else None,
            "critic_optimizer": self.critic_optimizer.state_dict() if self.critic_optimizer else None,
            "torch_random": torch.get_rng_state(),
            "python_random": random.getstate(),
        }

    def restore(self, policy: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Takes over the policy's weights and the `state` of another learner of the same shape."""
        assert (state["critic"] is None) == (self.critic is None), "the state is of a learner with another estimator"
        self.policy.load_state_dict(policy)
        self.policy_version = state["policy_version"]
        self.policy_optimizer.load_state_dict(state["policy_optimizer"])
        if self.critic and self.critic_optimizer:
            self.critic.load_state_dict(state["critic"])
            self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        torch.set_rng_state(state["torch_random"])
        random.setstate(state["python_random"])

    def _rows(self, trajectories: Sequence[Trajectory], credits: Sequence[Credit]) -> list[Row]:
        pairs = list(zip(trajectories, credits, strict=True))
        assert all(trajectory.trajectory_id == credit.trajectory_id for trajectory, credit in pairs)
        not_sampled = [credit.kept & credit.loss_mask & ~trajectory.action_mask for trajectory, credit in pairs]
        own = self._logprobs_at(trajectories, not_sampled)
        return [
            Row(
                trajectory=trajectory,
                credit=credit,
                old_logprobs=np.where(trajectory.action_mask, trajectory.logprobs, before),
            )
            for (trajectory, credit), before in zip(pairs, own, strict=True)
        ]

    def _step(self, rows: Sequence[Row], trains_policy: bool) -> Metrics:
        """One optimiser step of what trains in this iteration."""
        teaching = [row for row in rows if _has_gradient(row)]
        if not teaching:
            return {}
        metrics = self._policy_pass(teaching, sum(int(row.credit.loss_mask.sum()) for row in rows), learn=trains_policy)
        training: list[tuple[str, nn.Module, torch.optim.Optimizer]] = []
        if trains_policy:
            training.append(("policy", self.policy, self.policy_optimizer))
        if self.critic and self.critic_optimizer:
            tokens = sum(int(row.credit.critic_mask.sum()) for row in rows)
            metrics["critic/loss"] = self._critic_pass(self.critic, teaching, tokens)
            training.append(("critic", self.critic, self.critic_optimizer))
        for name, model, _ in training:
            metrics[f"{name}/grad_norm"] = self._clip_gradient(name, model, teaching)
        for _, _, optimizer in training:  # after both gradients proved finite, so that a failed step changes nothing
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return metrics

    def _policy_pass(self, rows: Sequence[Row], tokens: int, *, learn: bool) -> Metrics:
        """Adds up the policy's gradient of one optimiser step over `tokens` tokens, or only measures."""
        seen: list[PolicyTokens] = []
        for batch in self._batches([row.trajectory for row in rows], [row.credit.loss_mask for row in rows]):
            with torch.set_grad_enabled(learn), precision(self.device, self.dtype):
                logits = selected_logits(self.policy, batch.ids, batch.mask)
            logprobs = chosen_logprobs(logits, batch.ids[batch.mask])
            old_logprobs = batch.take([row.old_logprobs for row in rows])
            advantages = batch.take([row.credit.advantages for row in rows])
            _require_finite("policy loss", (logprobs - old_logprobs) * advantages, batch, rows)
            if learn:
                (self._policy_loss(logprobs, old_logprobs, advantages) / tokens).backward()
            sampled = batch.take([row.trajectory.action_mask for row in rows])
            seen.append(
                PolicyTokens(logprobs.detach(), old_logprobs, advantages, sampled, losses.entropy(logits.detach()))
            )
        return self._policy_metrics(PolicyTokens(*map(torch.cat, zip(*seen, strict=True))), tokens)

    def _policy_loss(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        clip_low, clip_high = self.params.clip_low, self.params.clip_high
        return losses.clipped_policy_loss(logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)

    def _policy_metrics(self, seen: PolicyTokens, tokens: int) -> Metrics:
        clip_low, clip_high = self.params.clip_low, self.params.clip_high
        clipped = losses.clipped_tokens(
            seen.logprobs, seen.old_logprobs, seen.advantages, clip_low=clip_low, clip_high=clip_high
        )
        ours, samplers = seen.logprobs[seen.sampled], seen.old_logprobs[seen.sampled]
        return {
            "policy/loss": self._policy_loss(seen.logprobs, seen.old_logprobs, seen.advantages).item() / tokens,
            "policy/clip_fraction": clipped.item() / len(seen.logprobs),
            "policy/entropy": seen.entropy.mean().item(),
            "policy/mismatch_kl": losses.mismatch_kl(ours, samplers).item() / len(ours),
            "policy/mismatch_max": (ours - samplers).abs().max().item(),
        }

    def _critic_pass(self, critic: Critic, rows: Sequence[Row], tokens: int) -> float:
        """Adds up the critic's gradient of one optimiser step over `tokens` tokens; returns the loss."""
        total = 0.0
        for batch in self._batches([row.trajectory for row in rows], [row.credit.critic_mask for row in rows]):
            with precision(self.device, self.dtype):
                values = critic(batch.ids)[batch.mask]
            old_values = batch.take([row.credit.values for row in rows])
            targets = batch.take([row.credit.value_targets for row in rows])
            _require_finite("critic loss", values - old_values - targets, batch, rows)
            loss = losses.clipped_value_loss(values, old_values, targets, value_clip=self.params.value_clip) / tokens
            loss.backward()
            total += loss.item()
        return total

    def _clip_gradient(self, name: str, model: nn.Module, rows: Sequence[Row]) -> float:
        """Scales the gradient down to `max_grad_norm` at most; returns the norm it had."""
        norm = clip_grad_norm_(model.parameters(), self.params.max_grad_norm).item()
        if not math.isfinite(norm):
            raise _not_finite(f"{name} gradient", [row.trajectory.trajectory_id for row in rows])
        return norm

    def _logprobs_at(self, trajectories: Sequence[Trajectory], masks: Sequence[Mask]) -> list[Floats]:
        return self._scores(lambda ids, mask: token_logprobs(self.policy, ids, mask), trajectories, masks)

    def _scores(
        self, score: Callable[[Tensor, Tensor], Tensor], trajectories: Sequence[Trajectory], masks: Sequence[Mask]
    ) -> list[Floats]:
        """What `score(ids, mask)` gives for the selected tokens, as [L] per trajectory with 0 elsewhere."""
        results = [np.zeros(len(mask), np.float32) for mask in masks]
        with torch.no_grad(), precision(self.device, self.dtype):
            for batch in self._batches(trajectories, masks):
                pieces = batch.split(score(batch.ids, batch.mask).cpu())
                for row, mask, piece in zip(batch.rows, batch.masks, pieces, strict=True):
                    results[row][mask] = piece.numpy()
        return results

    def _batches(self, trajectories: Sequence[Trajectory], masks: Sequence[Mask]) -> Iterator[MicroBatch]:
        assert all(trajectory.context_starts == [0] for trajectory in trajectories), "the learner reads one context"
        return batches(
            [trajectory.token_ids for trajectory in trajectories],
            masks,
            max_tokens=self.params.max_tokens_per_microbatch,
            device=self.device,
        )


def _has_gradient(row: Row) -> bool:
    """Whether a loss of the row is more than a constant; without one, skipping it changes nothing but the time."""
    credit = row.credit
    return bool(credit.advantages[credit.loss_mask].any() or credit.critic_mask.any())


def _adamw(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)


def _require_finite(what: str, terms: Tensor, batch: MicroBatch, rows: Sequence[Row]) -> None:
    """Checks the per-token terms [N] of a loss."""
    if not terms.isfinite().all():
        pieces = zip(batch.rows, batch.split(terms), strict=True)
        culprits = [rows[row].trajectory.trajectory_id for row, piece in pieces if not piece.isfinite().all()]
        raise _not_finite(what, culprits)


def _not_finite(what: str, trajectory_ids: Sequence[str]) -> FloatingPointError:
    return FloatingPointError(
        f"the {what} is not finite in trajectories {', '.join(trajectory_ids)}; their optimiser step was not taken: "
        "look at their rewards and advantages, or lower the learning rate and start again from the checkpoint"
    )


def _summary(steps: Sequence[Metrics]) -> Metrics:
    """Means over the steps that did something; the mismatch is the first one's, before any weight changed."""
    done = [step for step in steps if step]
    means = {name: sum(step[name] for step in done) / len(done) for name in (done[0] if done else {})}
    return means | {name: done[0][name] for name in means if name.startswith("policy/mismatch")}
