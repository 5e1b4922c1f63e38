"""Records to learn from, and gradients of a loss."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from agent_r1.records import Credit, Trajectory


class Samples(NamedTuple):
    """Trajectories with their credits."""

    trajectories: list[Trajectory]
    credits: list[Credit]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Takes the gradients of all weights that have one away from them."""
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found
