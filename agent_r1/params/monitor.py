"""`train.monitor`: the collapse monitor."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from agent_r1.params.sections import Count, Multiple, Natural, Section, Share


class MonitorThresholds(Section):
    """How far each sign of collapse may go; 0 switches it off. See `agent_r1.credit.collapse`."""

    reward_std_fall: Share
    entropy_fall: Share
    entropy_rise: Multiple
    grad_norm_spike: Multiple
    valid_call_fall: Share
    answer_repetition: Share
    thought_repetition: Share


class MonitorParams(Section):
    on_collapse: Literal["warn", "stop", "rollback"]
    max_rollbacks: Natural
    patience: Count
    first_iterations: Count
    thresholds: MonitorThresholds

    @model_validator(mode="after")
    def _reactions_have_an_effect(self) -> Self:
        if (self.on_collapse == "rollback") != (self.max_rollbacks > 0):
            raise ValueError(
                f"max_rollbacks {self.max_rollbacks} does not go with on_collapse: {self.on_collapse}; "
                "it is at least 1 with rollback, and 0 without"
            )
        if self.on_collapse != "warn" and not any(self.thresholds.model_dump().values()):
            raise ValueError(
                f"on_collapse: {self.on_collapse} has no effect while every threshold is 0; set one above 0, or warn"
            )
        return self
