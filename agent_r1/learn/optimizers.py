"""The optimisers of policy and critic, and what they keep of every weight from one step to the next."""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw as take_steps

from agent_r1.devices import sharding
from agent_r1.learn import adapter

State = dict[int, dict[str, Tensor]]  # by the number of a weight that trains


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose states lie in the machine's memory, where its cores take the steps, one weight after the other.

    The device then holds weights and gradients alone. It trusts in nothing that it keeps of a weight but its states, so
    that weights may be replaced between two steps.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Changes every weight that has a gradient, which is freed."""
        for group in self.param_groups:
            options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                here, gradient, weight.grad = weight.to("cpu", copy=True), weight.grad.to("cpu"), None
                kept = self.state[weight] = self.state[weight] or _blank(weight, self)
                take_steps(
                    [here],
                    [gradient],
                    [kept["exp_avg"]],
                    [kept["exp_avg_sq"]],
                    [],
                    [kept["step"]],
                    fused=True,
                    beta1=beta1,
                    beta2=beta2,
                    **options,
                )
                weight.copy_(here)


def adamw(
    model: nn.Module, learning_rate: float, *, betas: tuple[float, float], weight_decay: float, offload: bool
) -> torch.optim.AdamW:
    """The optimiser of all weights that train; on a GPU its states may be offloaded to the machine's memory."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = OffloadedAdamW if offload and trained[0].is_cuda else torch.optim.AdamW
    return kind(trained, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """The learning rate of the next steps."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def blank_state(optimizer: torch.optim.Optimizer) -> State:
    """What AdamW keeps of every weight from its first step on, all zero."""
    return {index: _blank(weight, optimizer) for index, weight in enumerate(_weights(optimizer))}


def take_state(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Has an optimiser go on from the state of another one of the same weights, and forget its own."""
    weights = _weights(optimizer)
    optimizer.state.clear()
    for index, kept in state.items():
        device = _place(weights[index], optimizer)
        optimizer.state[weights[index]] = {name: entry.to(device) for name, entry in kept.items()}


def _blank(weight: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The same of one weight."""
    device = _place(weight, optimizer)
    moments = {name: torch.zeros_like(weight, device=device) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=device), **moments}


def _place(weight: Tensor, optimizer: torch.optim.Optimizer) -> torch.device:
    """Where an optimiser keeps its state of a weight."""
    return torch.device("cpu") if isinstance(optimizer, OffloadedAdamW) else weight.device


def _weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def flat(states: Mapping[str, State]) -> dict[str, Tensor]:
    """The states of optimisers by their names in a checkpoint, such as `policy_optimizer.0.exp_avg`."""
    return {
        f"{name}.{index}.{entry}": tensor
        for name, state in states.items()
        for index, entries in state.items()
        for entry, tensor in entries.items()
    }


CRITIC = "critic."  # what the names of its weights begin with
VERSION, TORCH_RANDOM, PYTHON_RANDOM = "policy_version", "random.torch", "random.python"


def save(folder: Path, critic: nn.Module | None, optimizers: Mapping[str, Optimizer], policy_version: int) -> None:
    """Writes them, the random states those of the process; of a critic with adapters only what trains."""
    states = {name: optimizer.state_dict()["state"] for name, optimizer in optimizers.items()}
    sharding.save(folder, _trained(critic) | flat(states) | _own(policy_version))


def names(folder: Path, critic: nn.Module | None) -> set[str]:
    """The names of what was saved. A ValueError says that only one of the saved learner and this one has a critic."""
    stored = sharding.names(folder)
    if any(name.startswith(CRITIC) for name in stored) != (critic is not None):
        raise ValueError("of this learner and the saved one only one has a critic; set credit.estimator back")
    return stored


def restore(folder: Path, stored: Set[str], critic: nn.Module | None, optimizers: Mapping[str, Optimizer]) -> int:
    """Fills critic, optimisers and random states with what was saved under `names`; returns its policy's version.

    Raises ValueError if the saved learner trained other weights.
    """
    states = {name: blank_state(optimizer) for name, optimizer in optimizers.items()}
    begun = {name: state for name, state in states.items() if any(flat({name: state}).keys() & stored)}
    own = _own(0)
    found = _trained(critic) | flat(begun) | own
    adapter.require_same_weights(stored, found)
    sharding.load(folder, found)
    for name, taken in begun.items():
        take_state(optimizers[name], taken)
    torch.set_rng_state(own[TORCH_RANDOM])
    random.setstate((random.getstate()[0], tuple(own[PYTHON_RANDOM].tolist()), None))
    return int(own[VERSION])


def _own(policy_version: int) -> dict[str, Tensor]:
    """What every rank has whole."""
    _, python_random, _ = random.getstate()
    return {
        VERSION: torch.tensor(policy_version),
        TORCH_RANDOM: torch.get_rng_state(),
        PYTHON_RANDOM: torch.tensor(python_random),
    }


def _trained(critic: nn.Module | None) -> dict[str, Tensor]:
    """The critic's own weights that train; loading fills them."""
    trained = adapter.trained_state(critic) if critic else {}
    return {f"{CRITIC}{name}": weight for name, weight in trained.items()}
