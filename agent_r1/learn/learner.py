"""The learner: policy and critic, and the optimiser steps that make them better."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from agent_r1.devices.ranks import ALONE, Ranks, led
from agent_r1.devices.sharding import norm_of, parts
from agent_r1.files import model_hash
from agent_r1.learn import adapter, losses, optimizers
from agent_r1.learn.batching import Compute, Floats32, Reference, frozen, minibatches, score, score_logprobs
from agent_r1.learn.gradients import (
    CreditedTrajectory,
    add_critic_gradient,
    add_policy_gradient,
    join_credit,
    mismatch,
    not_finite,
)
from agent_r1.learn.model import Critic, compute_dtype, load_policy, load_tokenizer, recompute_activations
from agent_r1.learn.optimizers import adamw, set_rate
from agent_r1.learn.output import compute_output_in_float32
from agent_r1.params import Params
from agent_r1.params.stages import ModelParams
from agent_r1.params.train import TrainParams
from agent_r1.params.update import CriticParams, UpdateParams
from agent_r1.records import Credit, Trajectory
from agent_r1.seeds import derive

logger = logging.getLogger(__name__)


class Learner:
    """Holds the policy, the critic where the estimator needs one, and their optimisers.

    Weights that train are float32; with a compute dtype of bfloat16 the matrix products run in it. With adapters the
    weights beneath them, which do not train, are kept in the compute dtype. Nothing here draws random numbers after
    the start: the order of the trajectories follows from (seed, iteration, epoch).
    """

    def __init__(
        self,
        path: str | Path,
        params: UpdateParams,
        model: ModelParams,
        *,
        with_critic: bool,
        seed: int,
        with_reference: bool = False,
        device: torch.device | None = None,
        merges: bool = True,
        offload: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Starts from a Hugging Face folder or hub id, whatever `model.path` says; by default on the accelerator.

        Of adapters, `save_policy` writes the merged weights too if it `merges`; `offload` is that of `adamw`. A
        ValueError says what `path` lacks, or which option its model does not support. The `ranks` that share it are all
        given the same.
        """
        self.params = params
        self.seed = seed
        self.policy_version = 0  # updates that changed the policy's weights, since `path`
        self.ranks = ranks
        device = device or ranks.device
        self.compute = compute_of(model, params, device, ranks)
        widened = self.compute.float32_output
        if model.float32_output and not widened:
            logger.warning("model.float32_output: true has no effect: every layer computes in float32 on %s", device)
        self.adapter = model.adapter  # of policy and critic, which then train instead of the weights
        self.merges = merges
        self.beneath = model_hash(str(path)) if self.adapter else ""  # what adapters are trained beside
        stored = self.compute.dtype if self.adapter else torch.float32
        self.tokenizer = load_tokenizer(path)
        loads_on = ranks.loads_on(device)
        self.policy = load_policy(path, stored, loads_on, packed=self.compute.packed)
        if widened:
            compute_output_in_float32(self.policy)
        self.critic = Critic(path, stored, loads_on, packed=self.compute.packed) if with_critic else None
        backbones = {"policy": self.policy} | ({"critic": self.critic.backbone} if self.critic else {})
        for name, backbone in backbones.items():
            if self.adapter:
                adapter.attach(backbone, self.adapter, seed=derive(seed, "adapter", name))
            if model.gradient_checkpointing:
                recompute_activations(backbone)
        for shared in (self.policy, *([self.critic] if self.critic else [])):
            ranks.share_out(shared)
        make = partial(adamw, betas=params.betas, weight_decay=params.weight_decay, offload=offload)
        self.policy_optimizer = make(self.policy, params.learning_rate)
        self.critic_optimizer = make(self.critic, params.critic.learning_rate) if self.critic else None
        self.reference = reference_of(self, path) if with_reference else None

    @led
    def values(self, trajectories: Sequence[Trajectory]) -> list[Floats32]:
        """The critic's value [L] of the state before each token, 0 at a context's first; all 0 without a critic."""
        critic = self.critic
        if critic is None:
            return [np.zeros(len(each.token_ids), np.float32) for each in trajectories]
        everywhere = [np.ones(len(each.token_ids), np.bool_) for each in trajectories]
        return score(critic, trajectories, everywhere, self.compute)

    @led
    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[Floats32]:
        """The learner's own logprob [L] of every token in nats, 0 at a context's first, which nothing predicts."""
        predicted = [~np.isin(np.arange(len(each.token_ids)), each.context_starts) for each in trajectories]
        return score_logprobs(self.policy, trajectories, predicted, self.compute)

    @led
    def reference_logprobs(self, trajectories: Sequence[Trajectory]) -> list[Floats32]:
        """What the policy said, when the learner began, of the tokens that were sampled: [L] in nats, 0 elsewhere.

        Raises ValueError for a learner that was to have no reference.
        """
        if self.reference is None:
            raise ValueError("this learner has no reference; build it with one")
        return self.reference.logprobs(trajectories, [each.action_mask for each in trajectories])

    @led
    def update(
        self,
        trajectories: Sequence[Trajectory],
        credits: Sequence[Credit],
        iteration: int,
        *,
        rate: float = 1.0,
        explained_variance: float = 0.0,
    ) -> losses.Metrics:
        """Trains on one iteration's trajectories: `epochs` passes of `minibatches` optimiser steps, then the critic's.

        During the warm-up, which may end by what the critic explains of the value targets' variance, the critic trains
        alone; once the policy has been trained it is over. Trajectories that are not kept have no influence: the
        minibatches are formed without them. Those that are kept and have no gradient to give cost nothing, yet count in
        the denominators of the losses. `rate` is the share of the configured learning rates that the steps take.

        The metrics are means over the optimiser steps, those without a gradient left out; only the mismatch of sampler
        and learner is the first step's, before any weight changes, over all its action tokens. Raises
        FloatingPointError if a loss or gradient is not finite, in a step that then changes no weight, and ValueError if
        `kl_loss` needs a reference that the credits have not had.
        """
        rows = join_credit(self.policy, trajectories, credits, self.params, self.compute)
        rows = [row for row in rows if row.credit.kept]
        set_rate(self.policy_optimizer, self.params.learning_rate * rate)
        if self.critic_optimizer:
            set_rate(self.critic_optimizer, self.params.critic.learning_rate * rate)
        over = self.policy_version > 0 or self.params.critic.warmup.is_over(iteration, explained_variance)
        learn = self.critic is None or over
        steps: list[losses.Metrics] = []
        for chosen in self._minibatches(rows, self.params, iteration):
            steps.append(self.policy_step(chosen, learn=learn, first=not any(steps)))
        self.policy_version += learn and any(steps)
        critics = [self.critic_step(chosen) for chosen in self._minibatches(rows, self.params.critic, iteration)]
        teaching = [row for row in rows if row.has_gradient(self.params)]
        return (
            _summarise(steps)
            | _summarise(critics)
            | {
                "policy/learning_rate": self.params.learning_rate * rate,
                "update/trained_share": len(teaching) / len(trajectories),
                "update/tokens": float(self.params.epochs * sum(len(row.trajectory.token_ids) for row in teaching)),
            }
        )

    def _minibatches(
        self, rows: Sequence[CreditedTrajectory], params: UpdateParams | CriticParams, iteration: int
    ) -> Iterator[list[CreditedTrajectory]]:
        """The rows of one optimiser step after the other."""
        for chosen in minibatches(len(rows), params, seed=self.seed, iteration=iteration) if rows else ():
            yield [rows[index] for index in chosen]

    def policy_step(self, rows: Sequence[CreditedTrajectory], *, learn: bool, first: bool) -> losses.Metrics:
        """One optimiser step of the policy, or only its numbers; none where no loss has a gradient.

        The `first` one measures the mismatch of sampler and learner too. A FloatingPointError says that a loss or
        gradient is not finite; then no weight was changed.
        """
        teaching = [row for row in rows if row.loss_tokens and row.has_gradient(self.params)]
        if not teaching:
            return {}
        divisor = losses.normaliser([row.loss_tokens for row in rows], self.params)
        seen = add_policy_gradient(self.policy, teaching, divisor, self.params, self.compute, learn=learn)
        acted = sum(int(row.trajectory.action_mask.sum()) for row in rows)
        metrics = losses.policy_metrics(seen, self.params, divisor, acted)
        if first:
            metrics |= mismatch(self.policy, rows, seen, self.params, self.compute)
        if learn:
            metrics["policy/grad_norm"] = self._take_step("policy", self.policy, self.policy_optimizer, teaching)
        return metrics

    def critic_step(self, rows: Sequence[CreditedTrajectory]) -> losses.Metrics:
        """One optimiser step of the critic; no metrics where there is none to train. Raises as `policy_step`."""
        tokens = sum(int(row.credit.critic_mask.sum()) for row in rows)
        if self.critic is None or self.critic_optimizer is None or not tokens:
            return {}
        loss = add_critic_gradient(self.critic, rows, tokens, self.params.critic, self.compute)
        norm = self._take_step("critic", self.critic, self.critic_optimizer, rows)
        return {"critic/loss": loss, "critic/grad_norm": norm}

    def _take_step(
        self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, rows: Sequence[CreditedTrajectory]
    ) -> float:
        """Changes the weights by the gradient that was added up; returns its norm before the clipping."""
        norm = norm_of(clip_grad_norm_(model.parameters(), self.params.max_grad_norm))
        if not math.isfinite(norm):
            raise not_finite(f"{name} gradient", [row.trajectory.trajectory_id for row in rows])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    @led
    def save_policy(self, folder: Path) -> None:
        """Writes policy and tokenizer as an ordinary Hugging Face folder.

        Adapters are merged into its weights, which rounds them where these are bfloat16; the folder `adapter` in it
        holds them as they are. Without the merged weights it is all that an engine with adapters needs.
        """
        writes = self.ranks.leads
        if self.merges or not self.adapter:
            adapter.save_merged(self.policy, folder, writes=writes)
        elif writes:
            self.policy.config.save_pretrained(folder)
        if self.adapter:
            adapter.save_adapter(self.policy, self.adapter, folder, self.beneath, writes=writes)
        if writes:
            self.tokenizer.save_pretrained(folder)

    def take_policy(self, folder: Path) -> None:
        """Takes over what `save_policy` of another learner of the same shape wrote; a ValueError refuses others."""
        if self.adapter:
            adapter.load_adapter(self.policy, self.adapter, folder, self.beneath)
        else:
            stored = load_policy(folder, device=torch.device("cpu")).state_dict()
            self.policy.load_state_dict(parts(stored, self.policy))

    @led
    def save_state(self, folder: Path) -> None:
        """Writes what a learner needs to go on besides `save_policy`; the process's random states included.

        Where the critic has adapters, the weights beneath them are not in it.
        """
        optimizers.save(folder, self.critic, self._optimizers, self.policy_version)

    @led
    def restore(self, policy: Path, saved: Path) -> None:
        """Takes over what another learner of the same shape saved: its policy's folder, and that of its state.

        Raises ValueError if only one of the two has a critic, or it trained other weights.
        """
        stored = optimizers.names(saved, self.critic)
        self.take_policy(policy)
        self.policy_version = optimizers.restore(saved, stored, self.critic, self._optimizers)

    @property
    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        critic = {"critic_optimizer": self.critic_optimizer} if self.critic_optimizer else {}
        return {"policy_optimizer": self.policy_optimizer, **critic}


def reference_of(learner: Learner, path: str | Path) -> Reference:
    """A learner's start: its own policy without the adapters, or else the model at the `path` that it was given."""
    return Reference(learner.policy, learner.compute) if learner.adapter else frozen(path, learner.compute)


def learner_of(settings: Params, config: TrainParams, path: str | Path, *, seed: int, ranks: Ranks = ALONE) -> Learner:
    """The learner of a run that starts from the model at `path`; `ranks` build theirs by the same."""
    return Learner(
        path,
        config.update,
        settings.model,
        with_critic=config.credit.needs_critic,
        with_reference=config.needs_reference,
        seed=seed,
        merges=settings.engine.kind == "server",  # the others sample with the adapters themselves
        offload=settings.learner.optimizer_offload,
        ranks=ranks,
    )


def compute_of(model: ModelParams, params: UpdateParams, device: torch.device, ranks: Ranks = ALONE) -> Compute:
    """Where and how a learner computes."""
    dtype = compute_dtype(model.dtype, device)
    widened = model.float32_output and dtype is not torch.float32
    return Compute(
        device=device,
        dtype=dtype,
        max_tokens=params.max_tokens_per_microbatch,
        packed=model.packing,
        float32_output=widened,
        ranks=ranks,
    )


def _summarise(steps: Sequence[losses.Metrics]) -> losses.Metrics:
    """Means over the steps that have a metric."""
    done = [step for step in steps if step]
    found = {name: [step[name] for step in done if name in step] for name in (done[0] if done else {})}
    return {name: sum(values) / len(values) for name, values in found.items()}
