"""`train.credit`: rewards, estimator, masks, and what is left out of the update."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from agent_r1.params.sections import Natural, Needs, Refusals, Section, Share, Weight, nearest

LOGGED = frozenset({"total", "max", "std", "std_in_groups", "kl"})  # metrics reward/... that are no parts
FALLING = ["agent_r1", "failed_call", "repeat_call", "no_answer", "overlong", "length"]  # parts that may be below 0
OF_ANSWERS = ["agent_r1", "em", "f1", "grounded", "progress", "no_answer"]  # parts of questions that are answered
_NAME = re.compile(r"[A-Za-z_]\w{,99}", re.ASCII)


class AdvantageMask(Section):
    """Where action tokens are the only time steps; see `agent_r1.credit.batch`."""

    recursion: bool
    whitening: bool
    critic: bool


def _reference(function: str) -> str:
    if function and not re.fullmatch(rf"{_NAME.pattern}(\.{_NAME.pattern})*:{_NAME.pattern}", function, re.ASCII):
        raise ValueError("name a function as package.module:name")
    return function


class RewardFunction(Section):
    """An own reward; see `agent_r1.credit.own`. Without a function it is a part that an agent outside states."""

    function: Annotated[str, AfterValidator(_reference)] = ""
    weight: Weight
    batched: bool = False  # whether it takes a list of episodes and gives a list of values


class RewardWeights(Section):
    """Weights of the built-in parts; under further names, own rewards."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, RewardFunction]

    agent_r1: Weight = 0.0
    env: Weight = 0.0
    success: Weight = 0.0
    em: Weight = 0.0
    f1: Weight = 0.0
    grounded: Weight = 0.0
    think: Weight = 0.0
    valid_call: Weight = 0.0
    failed_call: Weight = 0.0
    progress: Weight = 0.0
    repeat_call: Weight = 0.0
    no_answer: Weight = 0.0
    overlong: Weight = 0.0
    length: Weight = 0.0

    @property
    def own(self) -> dict[str, RewardFunction]:
        """The own rewards, by name."""
        return dict(self.__pydantic_extra__)

    @property
    def functions(self) -> dict[str, RewardFunction]:
        """Those of them that are functions."""
        return {name: reward for name, reward in self.own.items() if reward.function}

    @property
    def built_in(self) -> Self:
        """The weights without own rewards, which training alone asks."""
        return type(self).model_construct(**{name: getattr(self, name) for name in type(self).model_fields})

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every part, built in or own."""
        built_in = {name: getattr(self, name) for name in type(self).model_fields}
        return built_in | {name: reward.weight for name, reward in self.own.items()}

    @model_validator(mode="before")
    @classmethod
    def _refuse_names(cls, content: Any) -> Any:
        """Rejects misspelt parts, and own rewards whose name is already a metric's."""
        for name, value in content.items() if isinstance(content, dict) else ():
            is_function = isinstance(value, dict | RewardFunction)
            is_part = name in cls.model_fields
            if not is_function and not is_part:
                remedy = "a reward of one's own is {function: package.module:name, weight: 1.0}, and a part that an "
                remedy += "agent outside states {weight: 1.0}"
                raise ValueError(f"unknown key {name!r}{nearest(name, cls.model_fields)}; {remedy}")
            if is_function and (is_part or name in LOGGED or not _NAME.fullmatch(name)):
                yours = "letters, digits and _ that are no part's name and none of " + ", ".join(sorted(LOGGED))
                raise ValueError(f"{name!r} cannot be the name of a reward of one's own; take {yours}")
        return content


Estimator = Literal[
    "gae",
    "step_gae",
    "bi_level_gae",
    "grpo",
    "dr_grpo",
    "maxrl",
    "rloo",
    "step_return",
    "gigpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
]
WITH_CRITIC = frozenset({"gae", "step_gae", "bi_level_gae"})
STEPS_IN_GROUPS = frozenset({"step_return", "gigpo"})  # compare the steps of a group's trajectories
STEP_LEVEL = frozenset({"step_gae", "bi_level_gae", *STEPS_IN_GROUPS})  # steps hold action tokens and no others
WITH_GROUPS = frozenset({"grpo", "dr_grpo", "maxrl", "rloo", "reinforce_pp_baseline", *STEPS_IN_GROUPS})
WITH_WHITENING = frozenset({*WITH_CRITIC, "reinforce_pp", "reinforce_pp_baseline"})
READS: dict[str, frozenset[str]] = {  # what each reads of `credit` that others do not
    "gae": frozenset({"gamma", "lam", "target_lam"}),
    "step_gae": frozenset({"step_gamma", "step_lam", "target_lam"}),
    "bi_level_gae": frozenset({"gamma", "lam", "step_gamma", "step_lam", "target_lam"}),
    "step_return": frozenset({"step_gamma"}),
    "gigpo": frozenset({"step_gamma", "gigpo"}),
    "reinforce_pp": frozenset({"gamma"}),
}


FILTERS = ("top_p", "top_fraction")
CRITIC = tuple(sorted(WITH_CRITIC))
WHITENING = tuple(sorted(WITH_WHITENING))


class FilterParams(Section):
    """Which groups are trained on; see `agent_r1.credit.assign.select`."""

    needs = (
        Needs("share", 1.0, "kind", FILTERS, ", which keeps every group"),
        Needs("refill", 0, "kind", FILTERS, ", which drops no group"),
    )

    kind: Literal["none", "top_p", "top_fraction"]
    share: Annotated[float, Field(ge=1e-6, le=1)]  # a smaller one would keep nothing
    refill: Natural


class LeftOutParams(Section):
    """Which episodes the policy loss leaves out, while statistics and critic keep them; see `assign.left_out`."""

    truncated: bool
    void_step: bool


class GigpoParams(Section):
    """The settings of estimator gigpo; see `agent_r1.credit.estimators.gigpo`."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    std: bool
    state: Literal["env", "context"]
    history: Natural


class CreditParams(Section):
    needs = (
        Needs("whitening_floor", 0, "estimator", WHITENING, ", which does not whiten over the batch"),
        Needs("advantage_mask.whitening", True, "estimator", WHITENING, ", which does not whiten"),
        Needs("advantage_mask.critic", True, "estimator", CRITIC, ", which trains no critic"),
        Needs("loss_mask", True, "advantage_mask.recursion", (False,), ", as advantages there are 0"),
    )

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
        """The keys of READS that the estimator reads."""
        return READS.get(self.estimator, frozenset())

    @property
    def in_groups(self) -> bool:
        """Whether the episodes of a question are compared."""
        return self.estimator in WITH_GROUPS

    @property
    def on_steps(self) -> bool:
        """Whether steps are the time steps, which hold action tokens and no others."""
        return self.estimator in STEP_LEVEL

    @property
    def observations_cannot_matter(self) -> bool:
        """Whether action tokens get the same raw advantages when observation tokens are time steps too."""
        if self.estimator == "gae":
            return self.gamma == self.lam == 1  # the deltas telescope
        return self.in_groups or self.gamma == 1

    @property
    def of_targets(self) -> CreditParams:
        """The settings with the lambdas of the value targets in place of the advantages' lambdas."""
        if self.target_lam is None:
            return self
        return self.model_copy(update={"lam": self.target_lam, "step_lam": self.target_lam})

    @property
    def remarks(self) -> Iterator[str]:
        """Warnings about allowed settings that do more than their names say."""
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

    def refusals(self) -> Refusals:
        estimator = f"estimator {self.estimator}"
        mask = self.advantage_mask
        if not any(self.rewards.weights.values()) and not self.kl_reward:
            yield "all reward weights are 0: nothing can be learned; set at least one above 0"
        divides_by_std = self.estimator == "grpo" or (self.estimator == "gigpo" and self.gigpo.std)
        if divides_by_std and self.kl_reward:
            why = "would be scaled up to unit variance where a group's rewards are equal"
            yield f"kl_reward {self.kl_reward} with {estimator} {why}; set it to 0, and train.update.kl_loss instead"
        penalties = [f"rewards.{part}" for part in FALLING if self.rewards.weights[part]] + ["kl_reward"] * (
            self.kl_reward > 0
        )
        if self.estimator == "maxrl" and penalties:
            why = f"takes returns of 0 and above, and {penalties[0]} may be below; set it to 0"
            yield f"{estimator} {why}, and weigh others, such as success"
        if (self.rewards.overlong > 0) != (self.overlong_buffer > 0):
            setting = f"overlong_buffer {self.overlong_buffer} with rewards.overlong {self.rewards.overlong}"
            yield f"{setting} has no effect; set both above 0, or both to 0"
        if self.rewards.overlong and self.left_out.truncated:
            setting = f"rewards.overlong {self.rewards.overlong} prices episodes that left_out.truncated: true"
            yield f"{setting} leaves out of the policy loss; set overlong and overlong_buffer to 0, or truncated: false"
        if self.on_steps and not (self.loss_mask and mask.recursion and mask.critic):
            masks = "loss_mask, advantage_mask.recursion and advantage_mask.critic"
            yield f"{estimator} works on steps, which hold action tokens only; leave {masks} true"
        if self.loss_mask and mask.whitening and not mask.recursion and self.observations_cannot_matter:
            setting = (
                f"advantage_mask.recursion: false has no effect on {estimator} at gamma {self.gamma} and lam {self.lam}"
            )
            why = "while the loss mask is on: the advantages at action tokens stay the same"
            yield f"{setting} {why}; set loss_mask: false or recursion: true"
