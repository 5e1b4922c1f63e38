"""`train`: what a run is, of its rollouts, credit, update and monitor, and which of them do not go together."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field

from agent_r1.params.credit import READS, CreditParams
from agent_r1.params.places import SCHEME
from agent_r1.params.sections import Count, Multiple, Natural, Positive, Section, Share, Weight, address

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
