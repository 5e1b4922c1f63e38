"""`train.update`: the optimiser and the loss."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agent_r1.params.sections import Count, Natural, Positive, Section, Weight

OF_CRITIC = frozenset({"critic_learning_rate", "critic_warmup_iterations", "value_clip"})  # read where there is one


class CanaryTolerance(Section):
    float32: Positive
    bfloat16: Positive


class UpdateParams(Section):
    learning_rate: Positive
    critic_learning_rate: Positive
    learning_rate_decay: Literal["none", "linear"]
    critic_warmup_iterations: Natural
    epochs: Count
    minibatches: Count
    ratio: Literal["token", "step", "sequence"]
    clip_low: Annotated[float, Field(gt=0, lt=1)]
    clip_high: Positive
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    importance_cap: Weight
    kl_loss: Weight
    entropy_bonus: Weight
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"]
    constant_length: Natural
    value_clip: Positive
    max_grad_norm: Positive
    max_tokens_per_microbatch: Count
    canary_tolerance: CanaryTolerance

    @property
    def regularised(self) -> bool:
        """Whether the policy loss has terms that give a gradient where the advantage is 0."""
        return self.kl_loss > 0 or self.entropy_bonus > 0

    @model_validator(mode="after")
    def _cap_lets_agreement_pass(self) -> Self:
        if 0 < self.importance_cap < 1:
            raise ValueError(
                f"importance_cap {self.importance_cap} cuts the weight even where sampler and learner agree, which "
                "only scales the loss; set it to 1 or more, or to 0 to switch it off"
            )
        return self

    @model_validator(mode="after")
    def _length_goes_with_its_aggregation(self) -> Self:
        if (self.aggregation == "constant_length") != (self.constant_length > 0):
            raise ValueError(
                f"constant_length {self.constant_length} with aggregation {self.aggregation}: it is the tokens that "
                "aggregation constant_length divides a trajectory's sum by, above 0 there and 0 with the others"
            )
        return self
