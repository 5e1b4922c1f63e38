"""Validation: how good a policy is on questions that its run does not train on, and which policy of the run was best.

A policy is validated after the iteration that made it, and its scores are metrics of that iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agent_r1.params.train import TrainParams
from agent_r1.records import Trajectory

EXACT_MATCH = "validation/em"

History = Sequence[Mapping[str, float]]  # the metrics of the finished iterations


def is_due(history: History, config: TrainParams, *, complete: bool) -> bool:
    """Whether the latest policy is to be validated and was not yet: of every so many, and that of a complete run."""
    every, finished = config.validation.every, len(history)
    if not every or not finished or EXACT_MATCH in history[-1]:
        return False
    return complete or finished % every == 0


def validation_scores(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Exact match and F1 of the answers, means over the episodes that the world did not cut short."""
    lived = [each for each in trajectories if not each.aborted]

    def mean(fact: str) -> float:
        return float(np.mean([each.steps[-1].rewards.get(fact, 0.0) for each in lived]))

    aborted = float(len(trajectories) - len(lived))
    return {EXACT_MATCH: mean("em"), "validation/f1": mean("f1"), "validation/aborted": aborted}


def is_best(history: History, exact_match: float) -> bool:
    """Whether the latest policy is better than every other that was validated."""
    return all(exact_match > each for each in _validated(history[:-1]))


def is_exhausted(history: History, patience: int) -> bool:
    """Whether the last `patience` validations brought no better policy; 0 never is."""
    scores = _validated(history)
    return bool(patience) and len(scores) - scores.index(max(scores)) > patience if scores else False


def _validated(history: History) -> list[float]:
    return [metrics[EXACT_MATCH] for metrics in history if EXACT_MATCH in metrics]
