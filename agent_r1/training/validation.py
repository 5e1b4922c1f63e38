"""Validation: how good a policy is on questions that its run does not train on, and which policy of the run was best.

A policy is validated after the iteration that made it, and its scores are metrics of that iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agent_r1.params.train import TrainParams
from agent_r1.records import Trajectory

VALIDATED = "validation/success"

History = Sequence[Mapping[str, float]]  # the metrics of the finished iterations


def is_due(history: History, config: TrainParams, *, complete: bool) -> bool:
    """Whether the latest policy is to be validated and was not yet: of every so many, and that of a complete run."""
    every, finished = config.validation.every, len(history)
    if not every or not finished or VALIDATED in history[-1]:
        return False
    return complete or finished % every == 0


def validation_scores(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Success, and F1 where answers have one, means over the episodes that the world did not cut short."""
    lived = [each for each in trajectories if not each.aborted]
    overlaps = [each.steps[-1].rewards.get("f1") for each in lived]
    f1 = {"validation/f1": float(np.mean([each or 0.0 for each in overlaps]))} if any(overlaps) else {}
    aborted = float(len(trajectories) - len(lived))
    return {VALIDATED: float(np.mean([each.success for each in lived])), **f1, "validation/aborted": aborted}


def is_best(history: History, success: float) -> bool:
    """Whether the latest policy is better than every other that was validated."""
    return all(success > each for each in _validated(history[:-1]))


def is_exhausted(history: History, patience: int) -> bool:
    """Whether the last `patience` validations brought no better policy; 0 never is."""
    scores = _validated(history)
    return bool(patience) and len(scores) - scores.index(max(scores)) > patience if scores else False


def _validated(history: History) -> list[float]:
    return [metrics[VALIDATED] for metrics in history if VALIDATED in metrics]
