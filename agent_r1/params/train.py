"""`train`: what a run is, of its rollouts, credit, update and monitor, and which of them do not go together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from agent_r1.params.credit import READS, STEPS_IN_GROUPS, WITH_GROUPS, CreditParams, FilterParams
from agent_r1.params.sections import Count, Multiple, Natural, Positive, Section, Share
from agent_r1.params.update import UpdateParams


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
    ahead: Annotated[int, Field(ge=0, le=1)]
    # The loss assumes that actions are drawn from the policy's own distribution, uncut.
    temperature: ClassVar[float] = 1.0
    top_p: ClassVar[float] = 1.0


class ValidationParams(Section):
    """How a run looks at questions that it does not train on; see `agent_r1.training.questions`."""

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
        yield from self._of_groups()
        yield from self._of_minibatches()
        yield from self._of_warmups()
        yield from self._of_going_back()

    def _of_groups(self) -> Iterator[str]:
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
        if self.rollout.ahead and self.credit.filter.refill:
            yield (
                f"rollout.ahead: 1 with credit.filter.refill {self.credit.filter.refill}: which groups are missing is "
                "known of the weights that sampled them, and those are an update behind; choose one of them"
            )

    def _of_minibatches(self) -> Iterator[str]:
        kind, samples = self.credit.filter.kind, self.rollout.samples
        minibatches = {"update.minibatches": self.update.minibatches}
        if self.credit.needs_critic:
            minibatches["update.critic.minibatches"] = self.update.critic.minibatches
        trajectories = self.rollout.questions * samples
        for name, count in minibatches.items():
            fill = f"do not fill {name} {count}; lower it or raise"
            if kind != "none" and samples < count:
                single = f"may keep a single group, whose {samples} trajectories"
                yield f"credit.filter {kind} {single} {fill} rollout.samples"
            if trajectories < count:
                product = "(rollout.questions times rollout.samples)"
                yield f"{trajectories} trajectories per iteration {product} {fill} rollout.questions"

    def _of_warmups(self) -> Iterator[str]:
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

    def _of_going_back(self) -> Iterator[str]:
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
