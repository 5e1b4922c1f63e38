"""`train`: what a run is, of its rollouts, credit, update and monitor, and which of them do not go together."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field

from agent_r1.harmless import without_password
from agent_r1.params.credit import READS, CreditParams
from agent_r1.params.places import SCHEME
from agent_r1.params.sections import (
    Count,
    Multiple,
    Natural,
    Needs,
    Positive,
    Refusals,
    Section,
    Share,
    Weight,
    address,
)

MASKS = ("mask_token", "mask_sequence", "mask_mean")
DIVIDES = "set it to the tokens that a trajectory's sum is divided by"
Beta = Annotated[float, Field(ge=0, lt=1)]
LARGEST_LOG_RATIO = 20.0  # nats; where the losses clamp a ratio's logarithm
LARGEST_K3 = 10.0  # nats; where the KL estimate k3 of a token ends


class CanaryTolerance(Section):
    float32: Positive
    bfloat16: Positive


class CriticWarmup(Section):
    """The iterations that train the critic alone."""

    iterations: Natural
    explained_variance: Share
    limit: Natural

    @property
    def longest(self) -> int:
        """The number of iterations after which it is over in any case."""
        return max(self.iterations, self.limit)

    def is_over(self, iteration: int, explained_variance: float) -> bool:
        """Whether an iteration may train the policy, where the critic explains that share of the return."""
        explains = explained_variance >= self.explained_variance or iteration >= self.limit
        return iteration >= self.iterations and explains


class CriticParams(Section):
    """How the critic is trained, where the estimator has one."""

    learning_rate: Positive
    epochs: Count
    minibatches: Count
    value_clip: Positive = 0.5
    warmup: CriticWarmup


class UpdateParams(Section):
    needs = (
        Needs("dual_clip", 0, "loss", ("clip",), ", whose weights clip_high bounds for every advantage"),
        Needs("importance_floor", 0, "importance_rule", MASKS, ", which leaves out no weight"),
        Needs("constant_length", 0, "aggregation", ("constant_length",), missing=DIVIDES),
    )

    learning_rate: Positive
    learning_rate_decay: Literal["none", "linear", "cosine"]
    learning_rate_warmup: Natural
    weight_decay: Weight
    betas: tuple[Beta, Beta]
    epochs: Count
    minibatches: Count
    loss: Literal["clip", "cispo"]
    ratio: Literal["token", "step", "sequence", "sequence_token"]
    clip_low: Annotated[float, Field(gt=0, le=1)]
    clip_high: Positive
    dual_clip: Multiple
    importance_cap: Weight
    importance_rule: Literal["cap", "mask_token", "mask_sequence", "mask_mean"]
    importance_floor: Annotated[float, Field(ge=0, lt=1)]
    kl_loss: Weight
    entropy_bonus: Weight
    balance_loss: Weight
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"]
    constant_length: Natural
    critic: CriticParams
    max_grad_norm: Positive
    max_tokens_per_microbatch: Count
    proved_trajectories: Count = 16
    canary_tolerance: CanaryTolerance

    @property
    def regularised(self) -> bool:
        """Whether the policy loss has terms that give a gradient where the advantage is 0."""
        return self.kl_loss > 0 or self.entropy_bonus > 0 or self.balance_loss > 0

    def refusals(self) -> Refusals:
        if 0 < self.importance_cap < 1:
            why = "cuts the weight even where sampler and learner agree"
            yield f"importance_cap {self.importance_cap} {why}; set it to 1 or more, or to 0 to switch it off"
        if self.importance_rule != "cap" and not self.importance_cap:
            why = (
                "has no upper bound, which importance_cap: 0 switches off; set that to one, such as 5.0 as IcePop does"
            )
            yield f"importance_rule: {self.importance_rule} {why}"
        if self.loss == "cispo" and self.ratio == "sequence_token":
            why = "is ratio: sequence with loss: cispo, which takes no gradient through the ratio"
            yield f"ratio: sequence_token {why}; set ratio: sequence"
        largest = math.exp(LARGEST_LOG_RATIO)  # a ratio's logarithm is clamped
        bounds = {"clip_high": 1 + self.clip_high, "dual_clip": self.dual_clip, "importance_cap": self.importance_cap}
        for name in [name for name, bound in bounds.items() if bound >= largest]:
            yield f"{name} {getattr(self, name):g} never acts: ratios end at e^20, {largest:.3g}; lower it"
        if self.loss == "clip" and 1 - self.clip_low <= 1 / largest:
            yield f"clip_low {self.clip_low:.17g} never acts: ratios begin at e^-20, {1 / largest:.3g}; lower it"
        warmup = self.critic.warmup
        if warmup.explained_variance and warmup.limit <= warmup.iterations:
            setting = f"critic.warmup.explained_variance {warmup.explained_variance} has no effect"
            why = f"with limit {warmup.limit}, which iterations {warmup.iterations} reaches"
            yield f"{setting} {why}; raise the limit, or set both to 0"
        if warmup.limit and not warmup.explained_variance:
            setting = f"critic.warmup.limit {warmup.limit} has no effect without explained_variance"
            yield f"{setting}; set limit: 0, or explained_variance above 0"


class MonitorThresholds(Section):
    """How far each sign of collapse may go; 0 switches it off. See `agent_r1.credit.collapse`."""

    reward_std_fall: Share = 0.4  # share of the first; of the std of the returns, in groups if there are any
    entropy_fall: Share = 0.1  # share of the first; of the surprisal of the actions
    entropy_rise: Multiple = 4.0  # times the first
    surprisal_jump: Multiple  # times the last ones without a jump
    long_step: Weight  # nats per action token
    grad_norm_spike: Multiple = 5.0  # times the median of all iterations before
    valid_call_fall: Share = 0.7  # share of the first
    answer_repetition: Share = 0.5  # share of the way from the first up to 1
    thought_repetition: Share = 0.5


class MonitorParams(Section):
    needs = (Needs("max_rollbacks", 0, "on_collapse", ("rollback",), missing="set it to 1 or more"),)

    on_collapse: Literal["warn", "stop", "rollback"]
    max_rollbacks: Natural
    patience: Count
    first_iterations: Count = 3
    thresholds: MonitorThresholds

    @property
    def goes_back(self) -> bool:
        """Whether an alarm may take the run back to a checkpoint."""
        return self.on_collapse == "rollback"


class RolloutParams(Section):
    questions: Count
    samples: Count
    ahead: Annotated[int, Field(ge=0, le=1)]
    demonstrate: Weight


class ValidationParams(Section):
    """How a run looks at questions that it does not train on; see `agent_r1.training.questions`."""

    every: Natural
    questions: Natural
    samples: Count = 1  # 1 is the greedy answer
    keep_best: bool
    patience: Natural


class CheckpointParams(Section):
    """When a run writes its checkpoint. Nothing trains differently for it."""

    every: Count


class KeepParams(Section):
    """The files that a finished run keeps besides its policy and metrics. Nothing trains differently for it."""

    learner: bool
    every: Count


class TrainParams(Section):
    seed: Natural
    reference: str  # a folder, hub id, registered version, or NAME at URL; "" is the model that the run starts from
    iterations: Count
    rollout: RolloutParams
    credit: CreditParams
    update: UpdateParams
    monitor: MonitorParams
    validation: ValidationParams
    checkpoint: CheckpointParams
    keep: KeepParams

    def rate(self, iteration: int, policy_from: int, begun: int, decays_over: int | None = None) -> float:
        """The share of its learning rate that a model takes in an iteration, if iteration `begun` is its first.

        It decays from 1 by the share of the policy's iterations that are over, which begin with `policy_from`, towards
        0, and rises before by equal parts: after a warm-up of W iterations, of which the first takes 1 / (W + 1), it is
        as without one. In a run that became longer it `decays_over` the iterations of before; later ones take the last
        share of these.
        """
        horizon = decays_over or self.iterations
        progress = min(max(0, iteration - policy_from), horizon - 1) / horizon
        decay = {"none": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        warmup = min(1.0, (iteration - begun + 1) / (self.update.learning_rate_warmup + 1))
        return decay[self.update.learning_rate_decay] * warmup

    @property
    def reference_at(self) -> tuple[str, str] | None:
        """The name and the address of a reference at a server; None of others. A ValueError refuses the address."""
        match = re.fullmatch(r"(\S+) at (https?://\S+)", self.reference)
        return (match[1], address(match[2])) if match else None

    @property
    def reference_is_registered(self) -> bool:
        """Whether the reference is a registered version, whose folder the registry tells."""
        return self.reference.startswith(SCHEME)

    @property
    def needs_reference(self) -> bool:
        """Whether the policy is held near another model, or near the one that it started from."""
        return self.credit.kl_reward > 0 or self.update.kl_loss > 0

    def require_read(self, overrides: dict[str, Any], where: str) -> None:
        """Refuses overrides that change nothing; what they are laid over serves other estimators too.

        A ValueError names, after `where`, those that the estimator does not read.
        """
        never = {
            "credit": frozenset[str]().union(*READS.values()) - self.credit.read,
            "update": frozenset[str]() if self.credit.needs_critic else frozenset({"critic"}),
        }
        unread = [f"{part}.{key}" for part, keys in never.items() for key in overrides.get(part, {}) if key in keys]
        if unread:
            raise ValueError(
                f"{where}: estimator {self.credit.estimator} does not read {', '.join(unread)}, which would change "
                "nothing; leave that out"
            )

    def refusals(self) -> Refusals:
        if not self.validation.every and (self.validation.keep_best or self.validation.patience):
            yield "validation.every: 0 validates nothing for keep_best and patience; set every to 1 or more"
        if "://" in self.reference and not self.reference_at:
            yield f"reference {without_password(self.reference)!r} is no model at a server; write NAME at https://HOST/v1"
        if self.reference and not self.needs_reference:
            setting = f"reference {self.reference!r} has no effect while credit.kl_reward and update.kl_loss are 0"
            yield f"{setting}; set one above 0, or leave it out"
        yield from self._groups()
        yield from self._minibatches()
        yield from self._warmups()
        yield from self._collapses()
        if self.validation.keep_best and self.keep.learner:
            why = "would leave the best policy beside the critic and the optimisers of the last one"
            yield f"validation.keep_best: true with keep.learner: true {why}; choose one of them"

    def _collapses(self) -> Refusals:
        collapse = f"monitor.on_collapse: {self.monitor.on_collapse}"
        patience = self.monitor.patience
        if self.monitor.on_collapse != "warn" and not any(self.monitor.thresholds.model_dump().values()):
            yield f"{collapse} has no effect while every threshold is 0; set one above 0, or warn"
        if self.monitor.on_collapse != "warn" and self.iterations <= patience:
            why = f"monitor.patience {patience} allows no alarm in {self.iterations} iterations"
            yield f"{collapse} has no effect: {why}; lower the patience"
        if self.validation.keep_best and self.monitor.goes_back:
            why = "the best policy may be of an iteration that the run went back from"
            yield f"validation.keep_best: true with {collapse}: {why}; choose one of them"
        if self.checkpoint.every > 1 and self.monitor.goes_back:
            why = "a run goes back to the checkpoint that an iteration began with, and most would have none"
            yield f"checkpoint.every {self.checkpoint.every} with {collapse}: {why}; set every: 1, or on_collapse: stop"

    def _groups(self) -> Refusals:
        estimator = f"estimator {self.credit.estimator}"
        selection = self.credit.filter
        few = f"and rollout.samples is {self.rollout.samples}; set it to 2 or more"
        if self.credit.in_groups and self.rollout.samples < 2:
            yield f"{estimator} compares the episodes of a group, {few}"
        if selection.kind != "none" and self.rollout.samples < 2:
            yield f"credit.filter {selection.kind} looks at how returns differ within a group, {few}"
        if self.update.ratio == "sequence_token" and self.credit.in_groups and not self.credit.on_steps:
            why = f"gives the gradient of ratio: sequence with {estimator}, whose advantage is the same at all tokens"
            yield f"update.ratio: sequence_token {why}; set ratio: sequence, or choose another estimator"
        if self.rollout.ahead and selection.refill:
            why = "the groups to replace are known of weights that are an update behind"
            yield f"rollout.ahead: 1 with credit.filter.refill {selection.refill}: {why}; choose one of them"

    def _minibatches(self) -> Refusals:
        kind = self.credit.filter.kind
        samples = self.rollout.samples
        trajectories = self.rollout.questions * self.rollout.samples
        counts = {"update.minibatches": self.update.minibatches}
        if self.credit.needs_critic:
            counts["update.critic.minibatches"] = self.update.critic.minibatches
        for name, count in counts.items():
            fill = f"do not fill {name} {count}; lower it or raise"
            if kind != "none" and samples < count:
                group = f"a single group, whose {samples} trajectories"
                yield f"credit.filter {kind} may keep {group} {fill} rollout.samples"
            if trajectories < count:
                product = "(rollout.questions times rollout.samples)"
                yield f"{trajectories} trajectories per iteration {product} {fill} rollout.questions"

    def _warmups(self) -> Refusals:
        rise = self.update.learning_rate_warmup
        if rise >= self.iterations:
            setting = f"update.learning_rate_warmup {rise}"
            yield f"{setting} lasts all {self.iterations} iterations; lower it or raise iterations"
