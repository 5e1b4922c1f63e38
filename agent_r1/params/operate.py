"""`operate`: how long a stage may take as part of a flow, and what is tried again."""

from __future__ import annotations

from agent_r1.params.sections import Natural, Positive, Section, Weight


class TimeoutsParams(Section):
    """Seconds by the name of a stage: those of dvc.yaml, and `view`."""

    prepare: Positive
    index: Positive
    warm_start: Positive
    train: Positive
    evaluate: Positive
    baseline: Positive
    report: Positive
    view: Positive


class OperateParams(Section):
    timeouts_s: TimeoutsParams
    retries: Natural
    retry_delay_s: Weight

    def timeout_s(self, stage: str) -> float:
        """Of a stage by its name: `train`."""
        timeouts: dict[str, float] = dict(self.timeouts_s)
        return timeouts[stage]
