"""`train.update`: losses, optimisers and the critic's training."""

from __future__ import annotations

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


class CriticParams(Section):
    """How the critic is trained, where the estimator has one."""

    learning_rate: Positive
    epochs: Count
    minibatches: Count
    value_clip: Positive = 0.5
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
    proved_trajectories: Count = 16
    canary_tolerance: CanaryTolerance

    @property
    def regularised(self) -> bool:
        """Whether the policy loss has terms that give a gradient where the advantage is 0."""
        return self.kl_loss > 0 or self.entropy_bonus > 0
