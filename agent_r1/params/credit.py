"""`train.credit`: rewards, masks, estimators, filter."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agent_r1.params.sections import Natural, Section, Share, Weight


class AdvantageMask(Section):
    """Where action tokens are the only time steps; see `agent_r1.credit.masks`."""

    recursion: bool
    whitening: bool
    critic: bool


class RewardWeights(Section):
    agent_r1: Weight
    em: Weight
    f1: Weight
    grounded: Weight
    think: Weight
    valid_call: Weight
    failed_call: Weight
    progress: Weight
    repeat_call: Weight
    no_answer: Weight

    @model_validator(mode="after")
    def _some_reward(self) -> Self:
        if not any(self.model_dump().values()):
            raise ValueError("all reward weights are 0: nothing can be learned; set at least one above 0")
        return self


Estimator = Literal[
    "gae", "step_gae", "bi_level_gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"
]
STEP_LEVEL = frozenset({"step_gae", "bi_level_gae"})  # work on steps, which hold action tokens and no others
WITH_CRITIC = frozenset({"gae", *STEP_LEVEL})
WITH_GROUPS = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"})  # one advantage per trajectory
WITH_WHITENING = frozenset({*WITH_CRITIC, "reinforce_pp", "reinforce_pp_baseline"})
DISCOUNTS: dict[str, frozenset[str]] = {  # what each reads of them; the others read none
    "gae": frozenset({"gamma", "lam"}),
    "step_gae": frozenset({"step_gamma", "step_lam"}),
    "bi_level_gae": frozenset({"gamma", "lam", "step_gamma", "step_lam"}),
    "reinforce_pp": frozenset({"gamma"}),
}


class FilterParams(Section):
    """Which groups are trained on; see `agent_r1.credit.filters`."""

    kind: Literal["none", "top_p", "top_fraction"]
    share: Annotated[float, Field(gt=0, le=1)]
    refill: Natural

    @model_validator(mode="after")
    def _share_has_an_effect(self) -> Self:
        if self.kind == "none" and self.share < 1:
            raise ValueError(
                f"share {self.share} has no effect with kind: none, which keeps every group; "
                "choose kind: top_p or top_fraction, or set share: 1.0"
            )
        if self.kind == "none" and self.refill:
            raise ValueError(
                f"refill {self.refill} has no effect with kind: none, which drops no group; "
                "choose kind: top_p or top_fraction, or set refill: 0"
            )
        return self


class CreditParams(Section):
    estimator: Estimator
    gamma: Share
    lam: Share
    step_gamma: Share
    step_lam: Share
    loss_mask: bool
    advantage_mask: AdvantageMask
    kl_reward: Weight
    rewards: RewardWeights
    filter: FilterParams

    @property
    def needs_critic(self) -> bool:
        return self.estimator in WITH_CRITIC

    @property
    def needs_groups(self) -> bool:
        return self.estimator in WITH_GROUPS

    @property
    def discounts(self) -> frozenset[str]:
        """Those of `gamma`, `lam`, `step_gamma` and `step_lam` that the estimator reads."""
        return DISCOUNTS.get(self.estimator, frozenset())

    @model_validator(mode="after")
    def _penalty_keeps_its_scale(self) -> Self:
        if self.estimator == "grpo" and self.kl_reward:
            raise ValueError(
                f"kl_reward {self.kl_reward} with estimator grpo: where a group's rewards are equal, the penalty alone "
                "would be scaled up to unit variance, whatever the coefficient; set kl_reward: 0 and "
                "train.update.kl_loss instead"
            )
        return self

    @model_validator(mode="after")
    def _switches_have_an_effect(self) -> Self:
        mask = self.advantage_mask
        if self.estimator in STEP_LEVEL and not (self.loss_mask and mask.recursion and mask.critic):
            raise ValueError(
                f"estimator {self.estimator} works on steps, which hold action tokens only: leave loss_mask, "
                "advantage_mask.recursion and advantage_mask.critic true"
            )
        if not self.loss_mask and mask.recursion:
            raise ValueError(
                "loss_mask: false has no effect while advantage_mask.recursion is true: the advantage at every "
                "observation token is 0; set advantage_mask.recursion: false as well"
            )
        if not self.needs_critic and not mask.critic:
            raise ValueError(f"estimator {self.estimator} trains no critic: leave advantage_mask.critic true")
        if self.estimator not in WITH_WHITENING and not mask.whitening:
            raise ValueError(
                f"estimator {self.estimator} does not whiten over the batch: leave advantage_mask.whitening true"
            )
        if self.loss_mask and mask.whitening and not mask.recursion and self._observations_cannot_matter():
            raise ValueError(
                f"advantage_mask.recursion: false has no effect on estimator {self.estimator} at gamma {self.gamma} "
                f"and lam {self.lam} while the loss mask is on: the advantages at action tokens are the same either "
                "way; set loss_mask: false or recursion: true"
            )
        return self

    def _observations_cannot_matter(self) -> bool:
        """Whether action tokens get the same raw advantages when observation tokens are time steps too (DESIGN §6)."""
        if self.estimator == "gae":
            return self.gamma == self.lam == 1  # the deltas telescope
        return self.needs_groups or self.gamma == 1
