"""The learner: policy and critic, and the optimiser steps that train them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from agent_r1.devices.sharing import ALONE, Ranks, led, parts, save_tensors, whole
from agent_r1.files import model_hash
from agent_r1.learn import adapter, gradients, losses, optimizers, scoring
from agent_r1.learn.gradients import CreditedTrajectory
from agent_r1.learn.model import Critic, compute_output_in_float32, load_policy, load_tokenizer, recompute_activations
from agent_r1.learn.scoring import Compute, score_logprobs
from agent_r1.params import Params
from agent_r1.params.stages import DtypeName, ModelParams
from agent_r1.params.train import TrainParams, UpdateParams
from agent_r1.pretrained import compute_dtype, end_tokens, experts_of, read_config, waiting
from agent_r1.records import Credit, Floats32, Mask, Metrics, Trajectory
from agent_r1.seeds import derive
from agent_r1.weight_sums import adapter_sums, sums_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a learner runs. The defaults suit one process on the accelerator."""

    with_reference: bool = False
    reference: str = ""  # its folder or hub id; "" is where the learner starts
    device: torch.device | None = None  # None is the default of `ranks`
    merges: bool = True  # whether a policy with adapters is saved with merged weights too
    offload: bool = False  # of the optimisers' states, see `adamw`
    ranks: Ranks = ALONE  # all of them get the same of everything else


DEFAULTS = Options()


class Models:
    """A learner's policy, its critic if the estimator needs one, and their optimisers: loaded, asked and stored.

    Weights that train are float32. With a compute dtype of bfloat16 the matrix products run in it, and weights beneath
    adapters, which do not train, are stored in it.
    """

    def __init__(
        self,
        path: str | Path,
        params: UpdateParams,
        model: ModelParams,
        *,
        with_critic: bool,
        seed: int,
        options: Options = DEFAULTS,
    ) -> None:
        """Starts from a folder or hub id; `model.path` is not read. A ValueError names a missing or unfit part."""
        if params.balance_loss and not experts_of(read_config(path)):
            raise ValueError(
                f"train.update.balance_loss {params.balance_loss} has no effect: {path} has no experts; set it to 0"
            )
        self.params = params
        self.seed = seed
        self.ranks = options.ranks
        self.merges = options.merges
        self.policy_version = 0  # updates that changed the policy's weights, since `path`
        self.compute = scoring.compute_of(model, params, options.device or self.ranks.device, self.ranks)
        self.adapter = model.adapter  # of policy and critic; the weights beneath do not train
        self.beneath = model_hash(str(path)) if self.adapter else ""  # the model that adapters are trained beside
        self.tokenizer = load_tokenizer(path)
        self.end_ids = end_tokens(path)  # beside the template's own
        self.policy, self.critic = _load_models(path, model, self.compute, with_critic=with_critic, seed=seed)
        self.compute = self.compute.of(self.policy)
        make = partial(optimizers.adamw, betas=params.betas, weight_decay=params.weight_decay, offload=options.offload)
        self.policy_optimizer = make(self.policy, params.learning_rate)
        self.critic_optimizer = make(self.critic, params.critic.learning_rate) if self.critic else None
        self.reference = reference_of(self, path, options.reference) if options.with_reference else None

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimisers by their names in a checkpoint."""
        critic = {"critic_optimizer": self.critic_optimizer} if self.critic_optimizer else {}
        return {"policy_optimizer": self.policy_optimizer, **critic}

    @led
    def values(self, trajectories: Sequence[Trajectory]) -> list[Floats32]:
        """The critic's value [L] of the state before each token, 0 at a context's first; all 0 without a critic."""
        if self.critic is None:
            return [np.zeros(len(trajectory.token_ids), np.float32) for trajectory in trajectories]
        everywhere = [np.ones(len(trajectory.token_ids), np.bool_) for trajectory in trajectories]
        return scoring.score(self.critic, trajectories, everywhere, self.compute)

    @led
    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[Floats32]:
        """The policy's logprob [L] of every token in nats, 0 at a context's first, which nothing predicts."""
        predicted = [
            ~np.isin(np.arange(len(trajectory.token_ids)), trajectory.context_starts) for trajectory in trajectories
        ]
        return score_logprobs(self.policy, trajectories, predicted, self.compute)

    @led
    def reference_logprobs(self, trajectories: Sequence[Trajectory]) -> list[Floats32]:
        """The reference's logprobs [L] of sampled tokens in nats, 0 elsewhere. A ValueError says that there is none."""
        if self.reference is None:
            raise ValueError("this learner has no reference; build it with one")
        return self.reference.logprobs(trajectories, [trajectory.action_mask for trajectory in trajectories])

    @led
    def save_policy(self, folder: Path, *, halved: bool = False) -> None:
        """Writes policy and tokenizer as an ordinary Hugging Face folder, with matrices in bfloat16 if `halved`.

        Its folder `adapter` holds adapters as they are. The merged weights, which bfloat16 rounds, are written only if
        the learner `merges`; an engine with adapters does without them.
        """
        writes = self.ranks.leads
        if self.merges or not self.adapter:
            adapter.save_merged(self.policy, folder, writes=writes, halved=halved)
        elif writes:
            self.policy.config.save_pretrained(folder)
            self.policy.generation_config.save_pretrained(folder)
        if self.adapter:
            adapter.save_adapter(self.policy, self.adapter, folder, self.beneath, writes=writes)
        if writes:
            self.tokenizer.save_pretrained(folder)

    @led
    def weight_sums(self, dtype: DtypeName) -> dict[str, int]:
        """The sums of the policy's weights as a sampler in `dtype` holds them; of adapters alone unless it `merges`."""
        rounded = compute_dtype(dtype, self.compute.device)
        if self.adapter and not self.merges:
            trained = adapter.trained_state(self.policy).items()
            return adapter_sums(self.policy, ((name, whole(weight)) for name, weight in trained), rounded)
        merged = adapter.merged_state(self.policy).items()
        return sums_of(((name, whole(weight)) for name, weight in merged), rounded)

    def take_policy(self, folder: Path) -> None:
        """Loads a policy that a learner of the same shape saved. A ValueError refuses others."""
        if self.adapter:
            adapter.load_adapter(self.policy, self.adapter, folder, self.beneath)
        else:
            stored = load_policy(folder, device=torch.device("cpu"), waits=self.ranks.size > 1)
            self.policy.load_state_dict(parts(stored.state_dict() | waiting(stored), self.policy))

    @led
    def save_state(self, folder: Path) -> dict[str, str]:
        """Writes critic (no weights beneath adapters), optimisers and random states; gives hashes as `save_tensors`."""
        return save_tensors(folder, optimizers.state_of(self.critic, self.optimizers, self.policy_version), self.ranks)

    @led
    def restore(self, policy: Path, saved: Path) -> None:
        """Loads policy and state that a learner of this shape saved. A ValueError refuses another critic or weights."""
        stored = optimizers.names(saved, self.critic)
        self.take_policy(policy)
        self.policy_version = optimizers.restore(saved, stored, self.critic, self.optimizers)


class Learner(Models):
    """Trains policy and critic. Nothing is random after the start: the order follows from (seed, iteration, epoch)."""

    @led
    def update(
        self,
        trajectories: Sequence[Trajectory],
        credits: Sequence[Credit],
        iteration: int,
        *,
        rate: float = 1.0,
        critic_rate: float = 1.0,
    ) -> Metrics:
        """Trains on one iteration's trajectories: the policy's optimiser steps, then the critic's.

        Each rate scales the configured learning rate of its model; at a `rate` of 0 the critic trains alone, and the
        policy is measured. Trajectories that are not kept are in no minibatch. Kept ones without a gradient cost
        nothing, but count in the losses' denominators. Demonstrations are among them; no metric counts one as an
        episode.

        The metrics are means over the optimiser steps that had a gradient; the mismatch of sampler and learner is that
        of the first step, before any weight changes, over all its action tokens. A FloatingPointError reports a loss or
        gradient that is not finite; its step changes no weight. A ValueError asks for the reference of a `kl_loss`.
        """
        rows = [row for row in self.credited(trajectories, credits) if row.credit.kept]
        rates = {"policy/learning_rate": self.params.learning_rate * rate}
        learn = rate > 0
        optimizers.set_rate(self.policy_optimizer, rates["policy/learning_rate"])
        if self.critic_optimizer:
            rates["critic/learning_rate"] = self.params.critic.learning_rate * critic_rate
            optimizers.set_rate(self.critic_optimizer, rates["critic/learning_rate"])
        draw = partial(scoring.minibatches, rows, seed=self.seed, iteration=iteration)
        steps = list[Metrics]()
        for minibatch in draw(self.params):
            steps.append(self.policy_step(minibatch, learn=learn, first=not any(steps)))
        self.policy_version += learn and any(steps)
        critics = [self.critic_step(minibatch) for minibatch in draw(self.params.critic)]
        teaching = [row for row in rows if row.has_gradient(self.params)]
        samples = {row.trajectory_id for row in trajectories if not row.demonstration_mask.any()}
        sampled = [row for row in rows if row.trajectory.trajectory_id in samples]
        return {
            **losses.means(steps),
            **losses.means(critics),
            **rates,
            "update/episodes": float(sum(row.loss_tokens > 0 for row in sampled) if learn else 0),
            "update/trained_share": sum(row.has_gradient(self.params) for row in sampled) / len(samples),
            "update/tokens": float(self.params.epochs * sum(len(row.trajectory.token_ids) for row in teaching)),
            "cost/gpu_peak_gib": torch.cuda.max_memory_reserved() / 2**30,
        }

    def credited(self, trajectories: Sequence[Trajectory], credits: Sequence[Credit]) -> list[CreditedTrajectory]:
        """The trajectories with their credits, as `policy_step` and `critic_step` take them."""
        return gradients.join_credit(self.policy, trajectories, credits, self.params, self.compute)

    def policy_step(self, rows: Sequence[CreditedTrajectory], *, learn: bool, first: bool) -> Metrics:
        """Takes one optimiser step of the policy, or only measures it; no metrics where no loss has a gradient.

        The `first` step also measures the mismatch of sampler and learner. Raises FloatingPointError as `update`.
        """
        teaching = [row for row in rows if row.loss_tokens and row.has_gradient(self.params)]
        if not teaching:
            return {}
        divisor = losses.normaliser([row.loss_tokens for row in rows], self.params)
        add = partial(gradients.add_policy_gradient, self.policy, teaching, divisor, self.params, learn=learn)
        tokens = optimizers.accumulate(add, self.policy_optimizer, divisor, self.compute)
        acted = sum(int(row.trajectory.action_mask.sum()) for row in rows)
        metrics = losses.policy_metrics(tokens, self.params, divisor, acted)
        if first and acted:
            metrics |= gradients.mismatch(self.policy, rows, tokens, self.params, self.compute)
        if learn:
            metrics["policy/grad_norm"] = self._take_step("policy", self.policy, self.policy_optimizer, teaching)
        return metrics

    def critic_step(self, rows: Sequence[CreditedTrajectory]) -> Metrics:
        """Takes one optimiser step of the critic; no metrics where there is none to train. Raises as `update`."""
        tokens = sum(int(row.credit.critic_mask.sum()) for row in rows)
        if self.critic is None or self.critic_optimizer is None or not tokens:
            return {}
        add = partial(gradients.add_critic_gradient, self.critic, rows, tokens, self.params.critic)
        loss = optimizers.accumulate(add, self.critic_optimizer, tokens, self.compute)
        norm = self._take_step("critic", self.critic, self.critic_optimizer, rows)
        return {"critic/loss": loss, "critic/grad_norm": norm}

    def _take_step(
        self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, rows: Sequence[CreditedTrajectory]
    ) -> float:
        """Changes the weights by the accumulated gradient; returns its norm before the clipping."""
        norm = float(whole(clip_grad_norm_(model.parameters(), self.params.max_grad_norm)).item())
        if not math.isfinite(norm):
            raise gradients.not_finite(f"{name} gradient", [row.trajectory.trajectory_id for row in rows])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm


@dataclass(frozen=True, slots=True)
class Reference:
    """A policy that is never trained. Its adapters are left out."""

    policy: PreTrainedModel
    compute: Compute

    def logprobs(self, trajectories: Sequence[Trajectory], masks: Sequence[Mask]) -> list[Floats32]:
        """The logprobs of the masked tokens; see `score_logprobs`."""
        with adapter.detached(self.policy):
            return score_logprobs(self.policy, trajectories, masks, self.compute)


def _load_policy(path: str | Path, dtype: torch.dtype, compute: Compute) -> PreTrainedModel:
    """The policy at `path` with weights in `dtype`, ready to compute, but not yet sharded. Raises as `load_policy`."""
    policy = load_policy(path, dtype, compute.device, packed=compute.packed, waits=compute.ranks.size > 1)
    if compute.float32_output:
        compute_output_in_float32(policy)
    return policy


def frozen(path: str | Path, compute: Compute) -> Reference:
    """The policy at `path` as a reference, in the compute dtype. Raises as `load_policy`."""
    policy = _load_policy(path, compute.dtype, compute).requires_grad_(False)
    compute.ranks.share_out(policy, compute.dtype)
    return Reference(policy, compute.of(policy))


def _load_models(
    path: str | Path, model: ModelParams, compute: Compute, *, with_critic: bool, seed: int
) -> tuple[PreTrainedModel, Critic | None]:
    """Loads policy and critic, attaches their adapters, and leaves each rank its shard."""
    if model.float32_output and not compute.float32_output:
        logger.warning(
            "model.float32_output: true has no effect: every layer computes in float32 on %s", compute.device
        )
    stored = compute.dtype if model.adapter else torch.float32
    place = torch.device("cpu") if model.base == "four_bit" else compute.device
    policy = _load_policy(path, stored, replace(compute, device=place))
    options = {"packed": compute.packed, "waits": compute.ranks.size > 1}
    critic = Critic(path, stored, place, **options) if with_critic else None
    backbones = {"policy": policy} | ({"critic": critic.backbone} if critic else {})
    for name, backbone in backbones.items():
        if model.base == "four_bit":
            from agent_r1.learn.four_bit import compress  # with bitsandbytes

            compress(backbone, compute.device)
            nn.Module.to(critic or policy, compute.device)
        if model.adapter:
            adapter.attach(backbone, model.adapter, seed=derive(seed, "adapter", name))
        if model.gradient_checkpointing:
            recompute_activations(backbone)
        if model.compile:
            from agent_r1.learn.compiled import compile_layers  # with torch's compiler, a slow import

            compile_layers(backbone)
    for shared in (policy, *([critic] if critic else [])):
        compute.ranks.share_out(shared, compute.dtype)
    return policy, critic


def reference_of(learner: Models, path: str | Path, reference: str = "") -> Reference:
    """The model at `reference`, else the learner's start: its own policy without the adapters, or the model at `path`.

    Raises ValueError for a model with other tokens.
    """
    if reference and load_tokenizer(reference).get_vocab() != learner.tokenizer.get_vocab():
        raise ValueError(
            f"train.reference {reference} has other tokens than {path}; take a model with the same tokenizer"
        )
    if reference or not learner.adapter:
        return frozen(reference or path, learner.compute)
    return Reference(learner.policy, learner.compute)


def learner_of(settings: Params, config: TrainParams, path: str | Path, *, seed: int, ranks: Ranks = ALONE) -> Learner:
    """The learner of a run that starts from the model at `path`; every rank builds its own with it."""
    options = Options(
        with_reference=config.needs_reference and not config.reference_at,
        reference=config.reference,
        merges=settings.engine.kind == "server",  # the others sample with the adapters themselves
        offload=settings.learner.optimizer_offload,
        ranks=ranks,
    )
    needed = config.credit.needs_critic
    return Learner(path, config.update, settings.model, with_critic=needed, seed=seed, options=options)
