"""`train.update`: losses, optimisers and the critic's training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from agent_r1.params.sections import Count, Multiple, Natural, Positive, Section, Share, Weight

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
