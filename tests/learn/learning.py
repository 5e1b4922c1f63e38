"""Records to learn from, gradients of a loss, and what a folder or a model holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agent_r1.params.sections import override
from agent_r1.params.stages import LoraParams
from agent_r1.params.train import UpdateParams
from agent_r1.records import Credit, Trajectory

CPU = torch.device("cpu")
LORA = LoraParams(rank=4, alpha=8.0, targets=["all-linear"])


class Samples(NamedTuple):
    """Trajectories with their credits."""

    trajectories: list[Trajectory]
    credits: list[Credit]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Takes the gradients of all weights that have one away from them."""
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def weights(*modules: nn.Module | None) -> list[Tensor]:
    """Copies of the weights of some modules."""
    return [weight.detach().clone() for module in modules if module for weight in module.parameters()]


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def with_changes(params: UpdateParams, **changes: Any) -> UpdateParams:
    return UpdateParams.model_validate(override(params.model_dump(), changes))


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by their paths in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
