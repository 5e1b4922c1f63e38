"""The optimisers of policy and critic, and what they keep of every weight from one step to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from agent_r1.params.update import UpdateParams

State = dict[int, dict[str, Tensor]]  # by the number of a weight that trains


def adamw(model: nn.Module, learning_rate: float, params: UpdateParams) -> torch.optim.AdamW:
    """The optimiser of all weights that train."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained, lr=learning_rate, betas=params.betas, weight_decay=params.weight_decay, fused=True
    )


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """The learning rate of the next steps."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def blank_state(optimizer: torch.optim.Optimizer) -> State:
    """What AdamW keeps of every weight from its first step on, all zero."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {
        index: {"step": torch.zeros(()), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        for index, weight in enumerate(weights)
    }


def take_state(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Has an optimiser go on from the state of another one of the same weights."""
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def flat(states: Mapping[str, State]) -> dict[str, Tensor]:
    """The states of optimisers by their names in a checkpoint, such as `policy_optimizer.0.exp_avg`."""
    return {
        f"{name}.{index}.{entry}": tensor
        for name, state in states.items()
        for index, entries in state.items()
        for entry, tensor in entries.items()
    }
