"""The learner: policy and critic, the optimiser steps that make them better, and the frozen reference."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from agent_r1.files import model_hash
from agent_r1.params.stages import ModelParams
from agent_r1.params.update import CriticParams, UpdateParams
from agent_r1.policy import adapter, losses, shards
from agent_r1.policy.batching import Compute, Floats32, Mask, micro_batches, minibatches, score, score_logprobs
from agent_r1.policy.losses import LossTokens, Metrics
from agent_r1.policy.model import (
    Critic,
    compute_dtype,
    default_device,
    load_policy,
    load_tokenizer,
    precision,
    recompute_activations,
)
from agent_r1.policy.output import compute_output_in_float32
from agent_r1.policy.rows import CreditedTrajectory, join_credit, not_finite, policy_pass, require_finite
from agent_r1.records import Credit, Trajectory
from agent_r1.seeds import derive

CRITIC = "critic."  # what the names of its weights begin with in a checkpoint
VERSION, TORCH_RANDOM, PYTHON_RANDOM = "policy_version", "random.torch", "random.python"

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
        device: torch.device | None = None,
        merges: bool = True,
    ) -> None:
        """Starts from a Hugging Face folder or hub id, whatever `model.path` says; by default on the accelerator.

        Of adapters, `save_policy` writes the merged weights too if it `merges`. A ValueError says what `path` lacks, or
        which option its model does not support.
        """
        self.params = params
        self.seed = seed
        self.policy_version = 0  # updates that changed the policy's weights, since `path`
        device = device or default_device()
        self.compute = compute_of(model, params, device)
        widened = self.compute.float32_output
        if model.float32_output and not widened:
            logger.warning("model.float32_output: true has no effect: every layer computes in float32 on %s", device)
        self.adapter = model.adapter  # of policy and critic, which then train instead of the weights
        self.merges = merges
        self.beneath = model_hash(str(path)) if self.adapter else ""  # what adapters are trained beside
        stored = self.compute.dtype if self.adapter else torch.float32
        self.tokenizer = load_tokenizer(path)
        self.policy = load_policy(path, stored, device)
        if widened:
            compute_output_in_float32(self.policy)
        self.critic = Critic(path, stored, device) if with_critic else None
        backbones = {"policy": self.policy} | ({"critic": self.critic.backbone} if self.critic else {})
        for name, backbone in backbones.items():
            if self.adapter:
                adapter.attach(backbone, self.adapter, seed=derive(seed, "adapter", name))
            if model.gradient_checkpointing:
                recompute_activations(backbone)
        self.policy_optimizer = _adamw(self.policy, params.learning_rate, params)
        self.critic_optimizer = _adamw(self.critic, params.critic.learning_rate, params) if self.critic else None

    def values(self, trajectories: Sequence[Trajectory]) -> list[Floats32]:
        """The critic's value [L] of the state before each token, 0 at a context's first; all 0 without a critic."""
        critic = self.critic
        if critic is None:
            return [np.zeros(len(each.token_ids), np.float32) for each in trajectories]
        everywhere = [np.ones(len(each.token_ids), np.bool_) for each in trajectories]
        return score(lambda ids, mask: critic(ids)[mask], trajectories, everywhere, self.compute)

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[Floats32]:
        """The learner's own logprob [L] of every token in nats, 0 at a context's first, which nothing predicts."""
        predicted = [~np.isin(np.arange(len(each.token_ids)), each.context_starts) for each in trajectories]
        return score_logprobs(self.policy, trajectories, predicted, self.compute)

    def update(
        self,
        trajectories: Sequence[Trajectory],
        credits: Sequence[Credit],
        iteration: int,
        *,
        rate: float = 1.0,
        explained_variance: float = 0.0,
    ) -> Metrics:
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
        _set_rate(self.policy_optimizer, self.params.learning_rate * rate)
        if self.critic_optimizer:
            _set_rate(self.critic_optimizer, self.params.critic.learning_rate * rate)
        over = self.policy_version > 0 or self.params.critic.warmup.is_over(iteration, explained_variance)
        learn = self.critic is None or over
        steps: list[Metrics] = []
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

    def policy_step(self, rows: Sequence[CreditedTrajectory], *, learn: bool, first: bool) -> Metrics:
        """One optimiser step of the policy, or only its numbers; none where no loss has a gradient.

        The `first` one measures the mismatch of sampler and learner too. A FloatingPointError says that a loss or
        gradient is not finite; then no weight was changed.
        """
        teaching = [row for row in rows if row.loss_tokens and row.has_gradient(self.params)]
        if not teaching:
            return {}
        divisor = losses.normaliser([row.loss_tokens for row in rows], self.params)
        seen = self._add_policy_gradient(teaching, divisor, learn=learn)
        acted = sum(int(row.trajectory.action_mask.sum()) for row in rows)
        metrics = losses.policy_metrics(seen, self.params, divisor, acted)
        if first:
            metrics |= self._mismatch(rows, seen)
        if learn:
            metrics["policy/grad_norm"] = self._take_step("policy", self.policy, self.policy_optimizer, teaching)
        return metrics

    def critic_step(self, rows: Sequence[CreditedTrajectory]) -> Metrics:
        """One optimiser step of the critic; no metrics where there is none to train. Raises as `policy_step`."""
        tokens = sum(int(row.credit.critic_mask.sum()) for row in rows)
        if self.critic is None or self.critic_optimizer is None or not tokens:
            return {}
        loss = self._add_critic_gradient(self.critic, rows, tokens)
        norm = self._take_step("critic", self.critic, self.critic_optimizer, rows)
        return {"critic/loss": loss, "critic/grad_norm": norm}

    def _take_step(
        self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, rows: Sequence[CreditedTrajectory]
    ) -> float:
        """Changes the weights by the gradient that was added up; returns its norm before the clipping."""
        norm = clip_grad_norm_(model.parameters(), self.params.max_grad_norm).item()
        if not math.isfinite(norm):
            raise not_finite(f"{name} gradient", [row.trajectory.trajectory_id for row in rows])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _add_policy_gradient(self, rows: Sequence[CreditedTrajectory], divisor: int, *, learn: bool) -> LossTokens:
        """Adds up the policy's gradient of one optimiser step, or only looks; returns the tokens of its loss."""
        seen: list[LossTokens] = []
        for tokens, terms in policy_pass(self.policy, rows, self.params, self.compute, learn=learn):
            if learn:
                ((terms * tokens.weights).sum() / divisor).backward()
            seen.append(tokens.detach())
        return losses.concatenate(seen)

    def _mismatch(self, rows: Sequence[CreditedTrajectory], seen: LossTokens) -> Metrics:
        """Of all action tokens of a step: those that its loss has `seen`, and with a pass of their own the others."""
        trajectories = [row.trajectory for row in rows]
        unseen = [row.trajectory.action_mask & ~(row.credit.loss_mask & row.has_gradient(self.params)) for row in rows]
        own = score_logprobs(self.policy, trajectories, unseen, self.compute)
        pairs = [(seen.logprobs[seen.sampled].cpu().numpy(), seen.sampler_logprobs[seen.sampled].cpu().numpy())]
        pairs += [(ours[mask], each.logprobs[mask]) for ours, each, mask in zip(own, trajectories, unseen, strict=True)]
        learners, samplers = (torch.from_numpy(np.concatenate(each)) for each in zip(*pairs, strict=True))
        return losses.mismatch_metrics(learners, samplers)

    def _add_critic_gradient(self, critic: Critic, rows: Sequence[CreditedTrajectory], tokens: int) -> float:
        """Adds up the critic's gradient of one optimiser step over `tokens` tokens; returns the loss."""
        total = 0.0
        trajectories, masks = [row.trajectory for row in rows], [row.credit.critic_mask for row in rows]
        for batch in micro_batches(trajectories, masks, self.compute):
            with precision(self.compute.device, self.compute.dtype):
                values = critic(batch.ids)[batch.mask]
            old_values = batch.take([row.credit.values for row in rows])
            targets = batch.take([row.credit.value_targets for row in rows])
            terms = losses.clipped_value_loss(values, old_values, targets, value_clip=self.params.critic.value_clip)
            require_finite("critic loss", batch, trajectories, terms, old_values)
            loss = terms.sum() / tokens
            loss.backward()
            total += loss.item()
        return total

    def save_policy(self, folder: Path) -> None:
        """Writes policy and tokenizer as an ordinary Hugging Face folder.

        Adapters are merged into its weights, which rounds them where these are bfloat16; the folder `adapter` in it
        holds them as they are. Without the merged weights it is all that an engine with adapters needs.
        """
        if self.merges or not self.adapter:
            adapter.save_merged(self.policy, folder)
        else:
            self.policy.config.save_pretrained(folder)
        if self.adapter:
            adapter.save_adapter(self.policy, self.adapter, folder, self.beneath)
        self.tokenizer.save_pretrained(folder)

    def take_policy(self, folder: Path) -> None:
        """Takes over what `save_policy` of another learner of the same shape wrote; a ValueError refuses others."""
        if self.adapter:
            adapter.load_adapter(self.policy, self.adapter, folder, self.beneath)
        else:
            self.policy.load_state_dict(load_policy(folder, device=torch.device("cpu")).state_dict())

    def save_state(self, folder: Path) -> None:
        """Writes what a learner needs to go on besides `save_policy`; the process's random states included.

        Where the critic has adapters, the weights beneath them are not in it.
        """
        states = {name: optimizer.state_dict()["state"] for name, optimizer in self._optimizers.items()}
        shards.save(folder, self._critic_state() | _flat(states) | self._own_state())

    def restore(self, policy: Path, state: Path) -> None:
        """Takes over what another learner of the same shape saved: its policy's folder, and that of its state.

        Raises ValueError if only one of the two has a critic, or it trained other weights.
        """
        stored = shards.names(state)
        if any(name.startswith(CRITIC) for name in stored) != (self.critic is not None):
            raise ValueError("of this learner and the saved one only one has a critic; set credit.estimator back")
        self.take_policy(policy)
        states = {name: _blank_state(optimizer) for name, optimizer in self._optimizers.items()}
        begun = {name: state for name, state in states.items() if any(_flat({name: state}).keys() & stored)}
        own = self._own_state()
        found = self._critic_state() | _flat(begun) | own
        if differing := sorted(found.keys() ^ stored):
            raise ValueError(
                f"the state is of a model that trains other weights, {differing[0]} for one; train it again"
            )
        shards.load(state, found)
        for name, taken in begun.items():
            self._optimizers[name].load_state_dict(self._optimizers[name].state_dict() | {"state": taken})
        self.policy_version = int(own[VERSION])
        torch.set_rng_state(own[TORCH_RANDOM])
        random.setstate((random.getstate()[0], tuple(own[PYTHON_RANDOM].tolist()), None))

    @property
    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        critic = {"critic_optimizer": self.critic_optimizer} if self.critic_optimizer else {}
        return {"policy_optimizer": self.policy_optimizer, **critic}

    def _own_state(self) -> dict[str, Tensor]:
        """What every rank has whole, by its name in a checkpoint."""
        _, python_random, _ = random.getstate()
        return {
            VERSION: torch.tensor(self.policy_version),
            TORCH_RANDOM: torch.get_rng_state(),
            PYTHON_RANDOM: torch.tensor(python_random),
        }

    def _critic_state(self) -> dict[str, Tensor]:
        """The critic's own weights that train, by their names in a checkpoint; `load` fills them."""
        trained = adapter.trained_state(self.critic) if self.critic else {}
        return {f"{CRITIC}{name}": weight for name, weight in trained.items()}


@dataclass(frozen=True, slots=True)
class Reference:
    """A policy that is never trained, to measure how far another one has gone from it; its adapters are left out."""

    policy: PreTrainedModel
    compute: Compute

    def logprobs(self, trajectories: Sequence[Trajectory], masks: Sequence[Mask]) -> list[Floats32]:
        """Its logprob in nats of every masked token: [L] per trajectory, 0 elsewhere; never of a context's first."""
        with adapter.detached(self.policy):
            return score_logprobs(self.policy, trajectories, masks, self.compute)


def reference_of(learner: Learner, path: str | Path) -> Reference:
    """A learner's start: its own policy without the adapters, or else the model at the `path` that it was given."""
    return Reference(learner.policy, learner.compute) if learner.adapter else frozen(path, learner.compute)


def frozen(path: str | Path, compute: Compute) -> Reference:
    """The model of a Hugging Face folder or hub id, in the compute dtype; raises as `load_policy`."""
    policy = load_policy(path, compute.dtype, compute.device).requires_grad_(False)
    if compute.float32_output:
        compute_output_in_float32(policy)
    return Reference(policy, compute)


def compute_of(model: ModelParams, params: UpdateParams, device: torch.device) -> Compute:
    """Where and how a learner computes."""
    dtype = compute_dtype(model.dtype, device)
    widened = model.float32_output and dtype is not torch.float32
    return Compute(device=device, dtype=dtype, max_tokens=params.max_tokens_per_microbatch, float32_output=widened)


def _adamw(model: nn.Module, learning_rate: float, params: UpdateParams) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained, lr=learning_rate, betas=params.betas, weight_decay=params.weight_decay, fused=True
    )


def _blank_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """What AdamW keeps of every weight from its first step on, all zero."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {
        index: {"step": torch.zeros(()), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        for index, weight in enumerate(weights)
    }


def _flat(states: Mapping[str, Mapping[int, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The states of optimisers by their names in a checkpoint, such as `policy_optimizer.0.exp_avg`."""
    return {
        f"{name}.{index}.{entry}": tensor
        for name, state in states.items()
        for index, entries in state.items()
        for entry, tensor in entries.items()
    }


def _set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _summarise(steps: Sequence[Metrics]) -> Metrics:
    """Means over the steps that have a metric."""
    done = [step for step in steps if step]
    found = {name: [step[name] for step in done if name in step] for name in (done[0] if done else {})}
    return {name: sum(values) / len(values) for name, values in found.items()}
