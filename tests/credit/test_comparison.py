"""Credits against each other and values against what came, worked out by hand."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.inspection.replay import advantage_comparison, value_errors
from agent_r1.params import load
from agent_r1.params.credit import RewardWeights
from agent_r1.records import Credit
from tests.cases import cases
from tests.credit.letters import progress, trajectory
from tests.trajectories import credit_of

WEIGHTS = RewardWeights.model_validate({**dict.fromkeys(RewardWeights.model_fields, 0.0), "progress": 1.0})
PROGRESS = load(Path(__file__).parents[2] / "params.yaml").train.credit.model_copy(update={"rewards": WEIGHTS})


def valued(values: Sequence[float], **fields: Any) -> Credit:
    return credit_of([0] * len(values), values=np.array(values, np.float32), **fields)


@cases("other, correlation")
def test_correlation_at_action_tokens(other: list[float], correlation: float) -> None:
    compared = advantage_comparison([trajectory("PAAOA")], [credit_of([0, 1, 2, 0, 3])], [credit_of(other)])
    assert compared["advantage/correlation"] == pytest.approx(correlation, nan_ok=True)


def test_shares() -> None:
    """Of the 4 and 2 tokens after the prompts, 2 and 0 have an advantage; 1 of 2 trajectories is kept."""
    rows = [trajectory("PPAAOA"), trajectory("PAA")]
    credits_ = [credit_of([0, 0, 1, 0, 0, -1]), credit_of([0, 0, 0], kept=False)]
    compared = advantage_comparison(rows, credits_, credits_)
    dropped = advantage_comparison(rows[1:], credits_[1:], credits_[1:])
    assert math.isnan(dropped["advantage/correlation"])
    assert compared["advantage/nonzero_share"] == pytest.approx(2 / 6)
    assert compared["advantage/kept_share"] == 0.5


def test_value_errors() -> None:
    """To come: 3 3 at the first action, 1 1 at what follows it, 1 at the second action."""
    row = trajectory("PAAOTA", progress(2, 1))
    errors = value_errors([row], [valued([9, 3, 3, 5, 4, 4])], PROGRESS)
    acting = {"value/action_rmse": math.sqrt(9 / 3), "value/action_std": math.sqrt(8 / 9)}  # errors 0, 0, 3; of 3, 3, 1
    observing = {"value/observation_rmse": math.sqrt((16 + 9) / 2), "value/observation_std": 0.0}  # errors 4, 3
    assert errors == pytest.approx(acting | observing)
    assert value_errors([trajectory("PAA")], [credit_of([0] * 3)], PROGRESS).keys() == acting.keys()
    assert value_errors([trajectory("PAA")], [credit_of([0] * 3, kept=False)], PROGRESS) == {}
