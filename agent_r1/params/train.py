"""`train`: rollout, credit, update and monitor of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from agent_r1.params.sections import Count, Multiple, Natural, Positive, Section, Share, Weight, nearest

LOGGED = frozenset({"total", "max", "std", "std_in_groups", "kl"})  # metrics reward/... that are no parts
_NAME = re.compile(r"[A-Za-z_]\w{,99}", re.ASCII)


class AdvantageMask(Section):
    """Where action tokens are the only time steps; see `agent_r1.credit.batch`."""

    recursion: bool
    whitening: bool
    critic: bool


def _reference(function: str) -> str:
    if not re.fullmatch(rf"{_NAME.pattern}(\.{_NAME.pattern})*:{_NAME.pattern}", function, re.ASCII):
        raise ValueError("name a function as package.module:name")
    return function


class RewardFunction(Section):
    """A reward of one's own; see `agent_r1.training.own_rewards`."""

    function: Annotated[str, AfterValidator(_reference)]
    weight: Weight
    batched: bool = False  # whether it takes a list of episodes and gives a list of values


OF_ANSWERS = ["agent_r1", "em", "f1", "grounded", "progress", "no_answer"]  # parts of questions that are answered


class RewardWeights(Section):
    """Of the built-in parts, and under further names functions of one's own."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, RewardFunction]

    agent_r1: Weight
    env: Weight
    success: Weight
    em: Weight
    f1: Weight
    grounded: Weight
    think: Weight
    valid_call: Weight
    failed_call: Weight
    progress: Weight
    repeat_call: Weight
    no_answer: Weight
    overlong: Weight
    length: Weight

    @property
    def own(self) -> dict[str, RewardFunction]:
        """The rewards of one's own, by name."""
        return dict(self.__pydantic_extra__)

    @property
    def built_in(self) -> Self:
        """The same without the rewards of one's own, which are asked in training alone."""
        return type(self).model_construct(**{name: getattr(self, name) for name in type(self).model_fields})

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every part, built in or one's own."""
        built_in = {name: getattr(self, name) for name in type(self).model_fields}
        return built_in | {name: reward.weight for name, reward in self.own.items()}

    @model_validator(mode="before")
    @classmethod
    def _refuse_names(cls, content: Any) -> Any:
        """What is no function is a misspelt part, and a function takes no name that another number is logged under."""
        for name, value in content.items() if isinstance(content, dict) else ():
            is_function, is_part = isinstance(value, dict | RewardFunction), name in cls.model_fields
            if not is_function and not is_part:
                remedy = "a reward of one's own is {function: package.module:name, weight: 1.0}"
                raise ValueError(f"unknown key {name!r}{nearest(name, cls.model_fields)}; {remedy}")
            if is_function and (is_part or name in LOGGED or not _NAME.fullmatch(name)):
                yours = "letters, digits and _ that are no part's name and none of " + ", ".join(sorted(LOGGED))
                raise ValueError(f"{name!r} cannot be the name of a reward of one's own; take {yours}")
        return content

    def objections(self) -> Iterator[str]:
        if not any(self.weights.values()):
            yield "all reward weights are 0: nothing can be learned; set at least one above 0"


Estimator = Literal[
    "gae",
    "step_gae",
    "bi_level_gae",
    "grpo",
    "dr_grpo",
    "rloo",
    "step_return",
    "gigpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
]
WITH_CRITIC = frozenset({"gae", "step_gae", "bi_level_gae"})
STEPS_IN_GROUPS = frozenset({"step_return", "gigpo"})  # compare the steps of a group's trajectories
STEP_LEVEL = frozenset({"step_gae", "bi_level_gae", *STEPS_IN_GROUPS})  # steps hold action tokens and no others
WITH_GROUPS = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", *STEPS_IN_GROUPS})
WITH_WHITENING = frozenset({*WITH_CRITIC, "reinforce_pp", "reinforce_pp_baseline"})
READS: dict[str, frozenset[str]] = {  # what each reads of `credit` that others do not
    "gae": frozenset({"gamma", "lam", "target_lam"}),
    "step_gae": frozenset({"step_gamma", "step_lam", "target_lam"}),
    "bi_level_gae": frozenset({"gamma", "lam", "step_gamma", "step_lam", "target_lam"}),
    "step_return": frozenset({"step_gamma"}),
    "gigpo": frozenset({"step_gamma", "gigpo"}),
    "reinforce_pp": frozenset({"gamma"}),
}


class FilterParams(Section):
    """Which groups are trained on; see `agent_r1.credit.filters`."""

    kind: Literal["none", "top_p", "top_fraction"]
    share: Annotated[float, Field(gt=0, le=1)]
    refill: Natural

    def objections(self) -> Iterator[str]:
        if self.kind == "none" and self.share < 1:
            yield (
                f"share {self.share} has no effect with kind: none, which keeps every group; "
                "choose kind: top_p or top_fraction, or set share: 1.0"
            )
        if self.kind == "none" and self.refill:
            yield (
                f"refill {self.refill} has no effect with kind: none, which drops no group; "
                "choose kind: top_p or top_fraction, or set refill: 0"
            )


class LeftOutParams(Section):
    """Which episodes the policy loss leaves out, while statistics and critic keep them; see `credit.filters`."""

    truncated: bool
    void_step: bool


class GigpoParams(Section):
    """Of estimator gigpo alone; see `agent_r1.credit.estimators.gigpo`."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    std: bool


class CreditParams(Section):
    estimator: Estimator
    gamma: Share
    lam: Share
    step_gamma: Share
    step_lam: Share
    target_lam: Share | None
    gigpo: GigpoParams
    loss_mask: bool
    advantage_mask: AdvantageMask
    whitening_floor: Weight
    kl_reward: Weight
    rewards: RewardWeights
    overlong_buffer: Natural
    left_out: LeftOutParams
    filter: FilterParams

    @property
    def needs_critic(self) -> bool:
        return self.estimator in WITH_CRITIC

    @property
    def read(self) -> frozenset[str]:
        """Those of `gamma`, `lam`, `step_gamma`, `step_lam`, `target_lam` and `gigpo` that the estimator reads."""
        return READS.get(self.estimator, frozenset())

    @property
    def divides_by_std(self) -> bool:
        """Whether advantages are divided by the standard deviation of their own group's returns."""
        return self.estimator == "grpo" or (self.estimator == "gigpo" and self.gigpo.std)

    @property
    def of_targets(self) -> CreditParams:
        """The same with the lambdas of the value targets in place of those of the advantages."""
        if self.target_lam is None:
            return self
        return self.model_copy(update={"lam": self.target_lam, "step_lam": self.target_lam})

    @property
    def remarks(self) -> Iterator[str]:
        """Says what settings do that are allowed, and do more than their names say."""
        mask = self.advantage_mask
        if mask.recursion and not mask.whitening:
            yield (
                "advantage_mask.whitening: false counts the advantage 0 of observation tokens in mean and standard "
                "deviation: advantages at action tokens are larger for it, and their mean is not 0"
            )
        if self.needs_critic and mask.critic and not mask.recursion:
            yield (
                "advantage_mask.recursion: false with critic: true reads values at observation tokens, where the "
                "critic is never trained"
            )

    def objections(self) -> Iterator[str]:
        if self.divides_by_std and self.kl_reward:
            yield (
                f"kl_reward {self.kl_reward} with estimator {self.estimator}: where a group's rewards are equal, the "
                "penalty alone would be scaled up to unit variance, whatever the coefficient; set kl_reward: 0 and "
                "train.update.kl_loss instead"
            )
        if (self.rewards.overlong > 0) != (self.overlong_buffer > 0):
            yield (
                f"overlong_buffer {self.overlong_buffer} with rewards.overlong {self.rewards.overlong}: the tokens "
                "over which that part falls to -1 are above 0 where it is weighted, and 0 where it is not"
            )
        if self.rewards.overlong and self.left_out.truncated:
            yield (
                f"rewards.overlong {self.rewards.overlong} prices episodes that left_out.truncated: true leaves out of "
                "the policy loss; set overlong and overlong_buffer to 0, or truncated: false"
            )
        mask = self.advantage_mask
        if self.estimator in STEP_LEVEL and not (self.loss_mask and mask.recursion and mask.critic):
            yield (
                f"estimator {self.estimator} works on steps, which hold action tokens only: leave loss_mask, "
                "advantage_mask.recursion and advantage_mask.critic true"
            )
        if not self.loss_mask and mask.recursion:
            yield (
                "loss_mask: false has no effect while advantage_mask.recursion is true: the advantage at every "
                "observation token is 0; set advantage_mask.recursion: false as well"
            )
        if not self.needs_critic and not mask.critic:
            yield f"estimator {self.estimator} trains no critic: leave advantage_mask.critic true"
        if self.estimator not in WITH_WHITENING and not mask.whitening:
            yield f"estimator {self.estimator} does not whiten over the batch: leave advantage_mask.whitening true"
        if self.estimator not in WITH_WHITENING and self.whitening_floor:
            yield (
                f"whitening_floor {self.whitening_floor} has no effect on estimator {self.estimator}, which does not "
                "whiten over the batch; set it to 0"
            )
        if self.loss_mask and mask.whitening and not mask.recursion and self._observations_cannot_matter():
            yield (
                f"advantage_mask.recursion: false has no effect on estimator {self.estimator} at gamma {self.gamma} "
                f"and lam {self.lam} while the loss mask is on: the advantages at action tokens are the same either "
                "way; set loss_mask: false or recursion: true"
            )

    def _observations_cannot_matter(self) -> bool:
        """Whether action tokens get the same raw advantages when observation tokens are time steps too (DESIGN §6)."""
        if self.estimator == "gae":
            return self.gamma == self.lam == 1  # the deltas telescope
        return self.estimator in WITH_GROUPS or self.gamma == 1


LARGEST_LOG_RATIO = 20.0  # nats; where the losses clamp a ratio's logarithm
LARGEST_K3_DIFFERENCE = 10.0  # nats; where the KL estimate k3 clamps its own


class CanaryTolerance(Section):
    float32: Positive
    bfloat16: Positive


Beta = Annotated[float, Field(ge=0, lt=1)]


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
        """Whether an iteration may train the policy, of whose value targets the critic explains that share."""
        explains = explained_variance >= self.explained_variance or iteration >= self.limit
        return iteration >= self.iterations and explains

    def objections(self) -> Iterator[str]:
        if self.explained_variance and self.limit <= self.iterations:
            yield (
                f"explained_variance {self.explained_variance} has no effect with limit {self.limit}, which ends the "
                f"warm-up by iterations {self.iterations}; raise the limit, or set explained_variance: 0 and limit: 0"
            )
        if self.limit and not self.explained_variance:
            yield (
                f"limit {self.limit} has no effect without explained_variance, which it keeps from lasting for ever; "
                "set limit: 0, or explained_variance above 0"
            )


class CriticParams(Section):
    """How the critic is trained, where the estimator has one."""

    learning_rate: Positive
    epochs: Count
    minibatches: Count
    value_clip: Positive
    warmup: CriticWarmup


class UpdateParams(Section):
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
    kl_loss: Weight
    entropy_bonus: Weight
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"]
    constant_length: Natural
    critic: CriticParams
    max_grad_norm: Positive
    max_tokens_per_microbatch: Count
    proved_trajectories: Count
    canary_tolerance: CanaryTolerance

    @property
    def regularised(self) -> bool:
        """Whether the policy loss has terms that give a gradient where the advantage is 0."""
        return self.kl_loss > 0 or self.entropy_bonus > 0

    def objections(self) -> Iterator[str]:
        if 0 < self.importance_cap < 1:
            yield (
                f"importance_cap {self.importance_cap} cuts the weight even where sampler and learner agree, which "
                "only scales the loss; set it to 1 or more, or to 0 to switch it off"
            )
        if self.loss == "cispo" and self.dual_clip:
            yield (
                f"dual_clip {self.dual_clip} has no effect with loss: cispo, whose weights clip_high bounds for every "
                "advantage; set dual_clip: 0"
            )
        if self.loss == "cispo" and self.ratio == "sequence_token":
            yield (
                "ratio: sequence_token is ratio: sequence with loss: cispo, which takes no gradient through the ratio; "
                "set ratio: sequence"
            )
        yield from self._bounds_out_of_reach()
        if (self.aggregation == "constant_length") != (self.constant_length > 0):
            yield (
                f"constant_length {self.constant_length} with aggregation {self.aggregation}: it is the tokens that "
                "aggregation constant_length divides a trajectory's sum by, above 0 there and 0 with the others"
            )

    def _bounds_out_of_reach(self) -> Iterator[str]:
        """The bounds that no ratio passes, because its logarithm is clamped."""
        largest = math.exp(LARGEST_LOG_RATIO)
        above = {"clip_high": 1 + self.clip_high, "dual_clip": self.dual_clip, "importance_cap": self.importance_cap}
        for name, bound in above.items():
            if bound >= largest:
                yield f"{name} {getattr(self, name):g} never acts: ratios end at e^20, {largest:.3g}; lower it"
        if self.loss == "clip" and 1 - self.clip_low <= 1 / largest:
            yield f"clip_low {self.clip_low:.17g} never acts: ratios begin at e^-20, {1 / largest:.3g}; lower it"


class MonitorThresholds(Section):
    """How far each sign of collapse may go; 0 switches it off. See `agent_r1.credit.collapse`."""

    reward_std_fall: Share
    entropy_fall: Share
    entropy_rise: Multiple
    grad_norm_spike: Multiple
    valid_call_fall: Share
    answer_repetition: Share
    thought_repetition: Share


class StabiliseParams(Section):
    """What becomes of a run with `on_collapse: stabilise` from its first alarm on; see `TrainParams.stabilised`."""

    rollback: bool  # whether it goes back to the last good checkpoint as well
    filter: FilterParams
    clip_high: Positive


class MonitorParams(Section):
    on_collapse: Literal["warn", "stop", "rollback", "stabilise"]
    max_rollbacks: Natural
    stabilise: StabiliseParams
    patience: Count
    first_iterations: Count
    thresholds: MonitorThresholds

    @property
    def goes_back(self) -> bool:
        """Whether an alarm may take the run back to a checkpoint."""
        return self.on_collapse == "rollback" or (self.on_collapse == "stabilise" and self.stabilise.rollback)

    def objections(self) -> Iterator[str]:
        if (self.on_collapse == "rollback") != (self.max_rollbacks > 0):
            yield (
                f"max_rollbacks {self.max_rollbacks} does not go with on_collapse: {self.on_collapse}; "
                "it is at least 1 with rollback, and 0 without"
            )
        if self.on_collapse != "warn" and not any(self.thresholds.model_dump().values()):
            yield f"on_collapse: {self.on_collapse} has no effect while every threshold is 0; set one above 0, or warn"


class RolloutParams(Section):
    questions: Count
    samples: Count
    temperature: Positive
    top_p: Annotated[float, Field(gt=0, le=1)]

    def objections(self) -> Iterator[str]:
        if self.top_p < 1:
            yield f"top_p {self.top_p} cuts the distribution that the loss assumes; training needs top_p: 1.0"
        if self.temperature != 1:
            yield (
                f"temperature {self.temperature} samples from another distribution than the loss assumes; "
                "training needs temperature: 1.0"
            )


class ValidationParams(Section):
    """How a run looks at questions that it does not train on; see `agent_r1.training.validation`."""

    every: Natural
    questions: Natural
    keep_best: bool
    patience: Natural

    def objections(self) -> Iterator[str]:
        if not self.every and (self.keep_best or self.patience):
            yield "every: 0 validates nothing, and keep_best and patience look at validations; set every to 1 or more"


class CheckpointParams(Section):
    """When a run writes all that it goes on from. Nothing trains differently for it."""

    every: Count


class KeepParams(Section):
    """What a finished run leaves on disk besides its policy and its metrics. Nothing trains differently for it."""

    learner: bool
    every: Count


class TrainParams(Section):
    seed: Natural
    iterations: Count
    rollout: RolloutParams
    credit: CreditParams
    update: UpdateParams
    monitor: MonitorParams
    validation: ValidationParams
    checkpoint: CheckpointParams
    keep: KeepParams

    def rate(self, iteration: int) -> float:
        """The share of the learning rates that an iteration's steps take.

        It decays from 1 by the share of the iterations that are over, towards 0, and rises before by equal parts: after
        a warm-up of W iterations, of which the first takes 1 / (W + 1), it is what it would be without one.
        """
        over = iteration / self.iterations
        decayed = {"none": 1.0, "linear": 1 - over, "cosine": (1 + math.cos(math.pi * over)) / 2}
        risen = min(1.0, (iteration + 1) / (self.update.learning_rate_warmup + 1))
        return decayed[self.update.learning_rate_decay] * risen

    @property
    def needs_reference(self) -> bool:
        """Whether the policy is held near the model it started from."""
        return self.credit.kl_reward > 0 or self.update.kl_loss > 0

    @property
    def stabilised(self) -> TrainParams:
        """The same once `monitor.stabilise` holds: as StarPO-S trains, whose later alarms are warnings.

        Source: RAGEN (arXiv 2504.20073), §4.2: groups whose returns differ most, no KL, clip-higher.
        """
        stabilise = self.monitor.stabilise
        changes = {
            "credit": {"filter": stabilise.filter, "kl_reward": 0.0},
            "update": {"clip_high": stabilise.clip_high, "kl_loss": 0.0},
            "monitor": {"on_collapse": "warn"},
        }
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=change) for name, change in changes.items()}
        )

    def require_read(self, overrides: dict[str, Any], where: str) -> None:
        """Refuses overrides that change nothing; what they are laid over serves other estimators too.

        A ValueError names, after `where`, those that the estimator or the monitor does not read.
        """
        never = {
            "credit": frozenset[str]().union(*READS.values()) - self.credit.read,
            "update": frozenset[str]() if self.credit.needs_critic else frozenset({"critic"}),
        }
        if self.monitor.on_collapse != "stabilise" and "stabilise" in overrides.get("monitor", {}):
            raise ValueError(
                f"{where}: monitor.stabilise would change nothing with on_collapse: {self.monitor.on_collapse}; leave "
                "that out, or set on_collapse: stabilise"
            )
        unread = [f"{part}.{key}" for part, keys in never.items() for key in overrides.get(part, {}) if key in keys]
        if unread:
            raise ValueError(
                f"{where}: estimator {self.credit.estimator} does not read {', '.join(unread)}, which would change "
                "nothing; leave that out"
            )

    def objections(self) -> Iterator[str]:
        kind, samples = self.credit.filter.kind, self.rollout.samples
        if self.update.ratio == "sequence_token" and self.credit.estimator in WITH_GROUPS - STEPS_IN_GROUPS:
            yield (
                f"update.ratio: sequence_token gives the gradient of ratio: sequence with estimator "
                f"{self.credit.estimator}, whose advantage is the same at all tokens of a trajectory; set ratio: "
                "sequence, or choose an estimator whose advantages differ"
            )
        few = f"and rollout.samples is {samples}; set it to 2 or more"
        if self.credit.estimator in WITH_GROUPS and samples < 2:
            yield f"estimator {self.credit.estimator} compares the episodes of a group, {few}"
        if kind != "none" and samples < 2:
            yield f"credit.filter {kind} looks at how returns differ within a group, {few}"
        minibatches = {"update.minibatches": self.update.minibatches}
        if self.credit.needs_critic:
            minibatches["update.critic.minibatches"] = self.update.critic.minibatches
        trajectories = self.rollout.questions * self.rollout.samples
        for name, count in minibatches.items():
            fill = f"do not fill {name} {count}; lower it or raise"
            if kind != "none" and samples < count:
                single = f"may keep a single group, whose {samples} trajectories"
                yield f"credit.filter {kind} {single} {fill} rollout.samples"
            if trajectories < count:
                product = "(rollout.questions times rollout.samples)"
                yield f"{trajectories} trajectories per iteration {product} {fill} rollout.questions"
        rise, alone = self.update.learning_rate_warmup, self.update.critic.warmup.iterations
        if rise >= self.iterations:
            yield (
                f"update.learning_rate_warmup {rise} lasts all {self.iterations} iterations; lower it or raise "
                "iterations"
            )
        if self.credit.needs_critic and 0 < rise <= alone:
            yield (
                f"update.learning_rate_warmup {rise} is over before the policy is first trained, after the {alone} "
                "iterations of update.critic.warmup; raise it above them, or set it to 0"
            )
        warmup = self.update.critic.warmup.longest
        if self.credit.needs_critic and warmup >= self.iterations:
            yield (
                f"update.critic.warmup may train the critic alone for {warmup} iterations, which are all "
                f"{self.iterations}, and the policy never; shorten it or raise iterations"
            )
        if self.validation.keep_best and self.monitor.goes_back:
            yield (
                f"validation.keep_best: true with monitor.on_collapse: {self.monitor.on_collapse}: the best policy may "
                "be of an iteration that the run went back from; choose one of them"
            )
        if self.checkpoint.every > 1 and self.monitor.goes_back:
            yield (
                f"checkpoint.every {self.checkpoint.every} with monitor.on_collapse: {self.monitor.on_collapse}: a run "
                "goes back to the checkpoint that an iteration began with, and most would have none; set every: 1, or "
                "on_collapse: stop"
            )
        if self.validation.keep_best and self.keep.learner:
            yield (
                "validation.keep_best: true with keep.learner: true would leave the best policy beside the critic and "
                "the optimisers of the last one; choose one of them"
            )
        if self.monitor.on_collapse != "warn" and self.iterations <= self.monitor.patience:
            yield (
                f"monitor.on_collapse: {self.monitor.on_collapse} has no effect: with monitor.patience "
                f"{self.monitor.patience} no alarm is possible in {self.iterations} iterations; lower the patience"
            )
        yield from self._objections_to_stabilising()

    def _objections_to_stabilising(self) -> Iterator[str]:
        """What is wrong with the run as it would be after an alarm."""
        if self.monitor.on_collapse != "stabilise":
            return
        later = self.stabilised
        if (later.credit, later.update) == (self.credit, self.update):
            yield (
                "monitor.on_collapse: stabilise changes nothing: the run has the filter and the clip_high of "
                "monitor.stabilise from its start, and no KL; set on_collapse: warn, or other settings there"
            )
        for part in (later, later.credit, later.update):
            yield from (f"once monitor.stabilise holds: {objection}" for objection in part.objections())
