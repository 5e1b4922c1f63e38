"""Trajectories written as letters, one per token: P prompt, A action, O observation, T template."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from agent_r1.params import CreditParams, RewardWeights
from agent_r1.records import CallStatus, Outcome, Source, Step, StopReason, Trajectory

LETTERS = {"P": Source.PROMPT, "A": Source.ACTION, "O": Source.OBSERVATION, "T": Source.TEMPLATE}

MakeTrajectory = Callable[..., Trajectory]
MakeParams = Callable[..., CreditParams]

# Properties draw the same examples in every run and are not timed: a busy machine must not fail them.
settings.register_profile("reproducible", deadline=None, derandomize=True, database=None)
settings.load_profile("reproducible")


def _step(span: tuple[int, int], **fields: Any) -> Step:
    plain = {
        "stop_reason": StopReason.END,
        "tool": "",
        "arguments": "",
        "call_status": CallStatus.NONE,
        "latency_s": 0.0,
        "rewards": {},
    }
    return Step(action_start=span[0], action_stop=span[1], **{**plain, **fields})


def _trajectory(
    letters: str,
    steps: Sequence[dict[str, Any]] = (),
    *,
    outcome: Outcome = Outcome.TURN_LIMIT,
    group: int = 0,
    name: str = "0/q/0",
) -> Trajectory:
    """Every run of As is a step; `steps` gives the fields that differ from a step without a call."""
    spans = [match.span() for match in re.finditer("A+", letters)]
    fields = [*steps, *[{}] * (len(spans) - len(steps))]
    return Trajectory(
        trajectory_id=name,
        question_id="q",
        group=group,
        sample=0,
        seed=0,
        policy_version=0,
        iteration=0,
        token_ids=np.arange(len(letters), dtype=np.int32),
        source=np.array([LETTERS[letter] for letter in letters], dtype=np.uint8),
        logprobs=np.zeros(len(letters), dtype=np.float32),
        context_starts=[0],
        steps=[_step(span, **differing) for span, differing in zip(spans, fields, strict=True)],
        outcome=outcome,
        answer="",
    )


def _params(estimator: str = "gae", **changes: Any) -> CreditParams:
    """Only `progress` is weighted, so that a test sets step rewards directly; all masks are on."""
    switches = {name: changes.pop(name, True) for name in ("recursion", "whitening", "critic")}
    weights = {**dict.fromkeys(RewardWeights.model_fields, 0.0), **changes.pop("weights", {"progress": 1.0})}
    content = {"gamma": 1.0, "lam": 1.0, "loss_mask": True, "filter": {"kind": "none", "share": 1.0}, **changes}
    return CreditParams.model_validate(
        {"estimator": estimator, "advantage_mask": switches, "rewards": weights, **content}
    )


@pytest.fixture
def trajectory() -> MakeTrajectory:
    return _trajectory


@pytest.fixture
def params() -> MakeParams:
    return _params
