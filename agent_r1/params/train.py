"""`train`: rollout, credit, update and monitor of a run."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from agent_r1.params.credit import DISCOUNTS, CreditParams
from agent_r1.params.monitor import MonitorParams
from agent_r1.params.sections import Count, Natural, Positive, Section
from agent_r1.params.update import OF_CRITIC, UpdateParams


class RolloutParams(Section):
    questions: Count
    samples: Count
    temperature: Positive
    top_p: Annotated[float, Field(gt=0, le=1)]

    @model_validator(mode="after")
    def _sampled_logprobs_are_the_policys(self) -> Self:
        if self.top_p < 1:
            raise ValueError(
                f"top_p {self.top_p} cuts the distribution that the loss assumes; training needs top_p: 1.0"
            )
        if self.temperature != 1:
            raise ValueError(
                f"temperature {self.temperature} samples from another distribution than the loss assumes; "
                "training needs temperature: 1.0"
            )
        return self


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
    keep: KeepParams

    def rate(self, iteration: int) -> float:
        """The share of the learning rates that an iteration's steps take: 1 at first, `1 / iterations` in the last."""
        return 1.0 if self.update.learning_rate_decay == "none" else 1 - iteration / self.iterations

    @property
    def needs_reference(self) -> bool:
        """Whether the policy is held near the model it started from."""
        return self.credit.kl_reward > 0 or self.update.kl_loss > 0

    def require_read(self, overrides: dict[str, Any], where: str) -> None:
        """Refuses overrides that change nothing; what they are laid over serves other estimators too.

        Raises:
            ValueError: the estimator does not read some of them; the message names these, after `where`.
        """
        never = {
            "credit": frozenset[str]().union(*DISCOUNTS.values()) - self.credit.discounts,
            "update": frozenset[str]() if self.credit.needs_critic else OF_CRITIC,
        }
        unread = [f"{part}.{key}" for part, keys in never.items() for key in overrides.get(part, {}) if key in keys]
        if unread:
            raise ValueError(
                f"{where}: estimator {self.credit.estimator} does not read {', '.join(unread)}, which would change "
                "nothing; leave that out"
            )

    @model_validator(mode="after")
    def _groups_where_needed(self) -> Self:
        if self.credit.needs_groups and self.rollout.samples < 2:
            raise ValueError(
                f"estimator {self.credit.estimator} compares the episodes of a group, and rollout.samples is "
                f"{self.rollout.samples}; set it to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _groups_to_filter(self) -> Self:
        kind, samples = self.credit.filter.kind, self.rollout.samples
        if kind == "none":
            return self
        if samples < 2:
            raise ValueError(
                f"credit.filter {kind} looks at how returns differ within a group, and rollout.samples is {samples}; "
                "set it to 2 or more"
            )
        if samples < self.update.minibatches:
            raise ValueError(
                f"credit.filter {kind} may keep a single group, whose {samples} trajectories do not fill "
                f"update.minibatches {self.update.minibatches}; lower it or raise rollout.samples"
            )
        return self

    @model_validator(mode="after")
    def _trajectories_for_every_step(self) -> Self:
        trajectories = self.rollout.questions * self.rollout.samples
        if trajectories < self.update.minibatches:
            raise ValueError(
                f"{trajectories} trajectories per iteration (rollout.questions times rollout.samples) do not fill "
                f"update.minibatches {self.update.minibatches}; lower it or raise rollout.questions"
            )
        return self

    @model_validator(mode="after")
    def _time_to_train(self) -> Self:
        warmup = self.update.critic_warmup_iterations
        if self.credit.needs_critic and warmup >= self.iterations:
            raise ValueError(
                f"update.critic_warmup_iterations {warmup} trains the critic alone in all {self.iterations} "
                "iterations, and the policy never; lower it or raise iterations"
            )
        return self

    @model_validator(mode="after")
    def _time_to_react(self) -> Self:
        if self.monitor.on_collapse != "warn" and self.iterations <= self.monitor.patience:
            raise ValueError(
                f"monitor.on_collapse: {self.monitor.on_collapse} has no effect: with monitor.patience "
                f"{self.monitor.patience} no alarm is possible in {self.iterations} iterations; lower the patience"
            )
        return self
