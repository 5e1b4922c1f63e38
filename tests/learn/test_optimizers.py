"""An optimiser whose states are offloaded learns what one on the device does, to the bit where both are a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from agent_r1.learn import optimizers as module
from agent_r1.learn.optimizers import OffloadedAdamW
from tests.learn.learning import Samples, record_of

Make = Callable[..., Any]


def offloading(model: nn.Module, learning_rate: float, *, offload: bool, **options: Any) -> OffloadedAdamW:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return OffloadedAdamW(trained, lr=learning_rate, fused=True, **options)


def test_offloaded_states_give_the_bits_of_others_and_go_on_from_them(
    make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where another learner's weights and states take the place of its own between two updates."""
    trajectories, credits_ = samples
    plain = make_learner(minibatches=2, weight_decay=0.1)
    monkeypatch.setattr(module, "adamw", offloading)
    offloaded, other = (make_learner(minibatches=2, weight_decay=0.1) for _ in range(2))
    assert isinstance(other.policy_optimizer, OffloadedAdamW)
    other.update(trajectories[:2], credits_[:2], 0)
    before = record_of(other)
    for iteration in range(2):
        for learner in (plain, offloaded):
            learner.update(trajectories, credits_, iteration, rate=0.5 + iteration)
        assert record_of(offloaded) == record_of(plain) != before

    plain.save_policy(tmp_path / "policy")
    plain.save_state(tmp_path / "learner")
    other.restore(tmp_path / "policy", tmp_path / "learner")
    for learner in (plain, other):
        learner.update(trajectories, credits_, 2)
    assert record_of(other) == record_of(plain)
