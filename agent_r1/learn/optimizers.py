"""The optimisers of policy and critic, and the state that they keep of every weight from one step to the next."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw as take_steps

from agent_r1.devices.sharing import load_tensors, tensor_names, whole
from agent_r1.learn.adapter import trained_state
from agent_r1.learn.scoring import Compute

AdamState = dict[int, dict[str, Tensor]]  # by the number of a weight that trains

CRITIC = "critic."  # prefix of the names of its weights
VERSION = "policy_version"
TORCH_RANDOM = "random.torch"
PYTHON_RANDOM = "random.python"
HEADROOM = (0, 6, 12)  # powers of two by which the scale of a loss in float16 falls, one after the other

T = TypeVar("T")

logger = logging.getLogger(__name__)


class OffloadedAdamW(AdamW):
    """AdamW with its states in the machine's memory, where the cores take the steps, one weight after the other.

    The device then holds weights and gradients alone. Weights may be replaced between two steps.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Changes every weight that has a gradient, and frees the gradient."""
        for group in self.param_groups:
            options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
            options["beta1"], options["beta2"] = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                cpu_weight = weight.to("cpu", copy=True)
                gradient = weight.grad.to("cpu")
                weight.grad = None
                state = self.state[weight] = self.state[weight] or _blank(weight, self)
                moments = ([state["exp_avg"]], [state["exp_avg_sq"]])
                take_steps([cpu_weight], [gradient], *moments, [], [state["step"]], fused=True, **options)
                weight.copy_(cpu_weight)


def adamw(
    model: nn.Module, learning_rate: float, *, betas: tuple[float, float], weight_decay: float, offload: bool
) -> AdamW:
    """The optimiser of all weights that train. On a GPU it can offload its states to the machine's memory."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = OffloadedAdamW if offload and trained[0].is_cuda else AdamW
    return kind(trained, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True)


def accumulate(add: Callable[[Compute], T], optimizer: Optimizer, divisor: float, compute: Compute) -> T:
    """Accumulates a gradient by `add`, and takes the scale of its loss out again.

    In float16 the gradients of tokens, which the `divisor` of a loss makes small, would vanish. The scale there is the
    power of two next to it, which changes no other bit. A gradient that overflows is computed again with a smaller one:
    what is left after the last is not finite. Nothing of a step is kept for the next. Elsewhere the scale is 1.
    """
    if compute.dtype is not torch.float16:
        return add(compute)
    for fall in HEADROOM:
        optimizer.zero_grad(set_to_none=True)
        scale = 2.0 ** (math.frexp(divisor)[1] - fall)
        result = add(replace(compute, scale=scale))
        gradients = [weight.grad for weight in weights(optimizer) if weight.grad is not None]
        for gradient in gradients:
            gradient.div_(scale)
        if whole(get_total_norm(gradients)).isfinite():
            break
        logger.info("a gradient in float16 is not finite with a loss %g times its size", scale)
    return result


def set_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of the next steps."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def blank_state(optimizer: Optimizer) -> AdamState:
    """The state that AdamW keeps from its first step on, all zero."""
    return {index: _blank(weight, optimizer) for index, weight in enumerate(weights(optimizer))}


def take_state(optimizer: Optimizer, state: AdamState) -> None:
    """Replaces an optimiser's state by that of another one of the same weights."""
    parameters = weights(optimizer)
    optimizer.state.clear()
    for index, entries in state.items():
        device = _place(parameters[index], optimizer)
        optimizer.state[parameters[index]] = {name: entry.to(device) for name, entry in entries.items()}


@contextmanager
def undone(optimizers: Sequence[Optimizer], device: torch.device) -> Iterator[None]:
    """Undoes the optimiser steps of a block. Weights and optimiser states are meanwhile kept on the CPU.

    On CUDA the block starts with a new peak of memory, and the allocator's unused memory is freed after it.
    """
    trained = [weight for optimizer in optimizers for weight in weights(optimizer)]
    values = [weight.detach().to("cpu", copy=True) for weight in trained]
    gradients = [weight.grad for weight in trained]
    states = [_copied(optimizer.state_dict()["state"]) for optimizer in optimizers]
    for weight in trained:
        weight.grad = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for weight, old, gradient in zip(trained, values, gradients, strict=True):
            weight.data.copy_(old)
            weight.grad = gradient
        for optimizer, state in zip(optimizers, states, strict=True):
            take_state(optimizer, state)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _copied(state: AdamState) -> AdamState:
    return {
        index: {name: entry.to("cpu", copy=True) for name, entry in entries.items()} for index, entries in state.items()
    }


def weights(optimizer: Optimizer) -> list[Tensor]:
    """The weights that an optimiser trains."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _blank(weight: Tensor, optimizer: Optimizer) -> dict[str, Tensor]:
    """The blank state of one weight."""
    device = _place(weight, optimizer)
    moments = {name: torch.zeros_like(weight, device=device) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=device), **moments}


def _place(weight: Tensor, optimizer: Optimizer) -> torch.device:
    """The device of an optimiser's state of a weight."""
    return torch.device("cpu") if isinstance(optimizer, OffloadedAdamW) else weight.device


def flat(states: Mapping[str, AdamState]) -> dict[str, Tensor]:
    """The states of optimisers by their names in a checkpoint, such as `policy_optimizer.0.exp_avg`."""
    return {
        f"{name}.{index}.{entry}": tensor
        for name, state in states.items()
        for index, entries in state.items()
        for entry, tensor in entries.items()
    }


def state_of(critic: nn.Module | None, optimizers: Mapping[str, Optimizer], policy_version: int) -> dict[str, Tensor]:
    """The critic's weights that train, the optimisers' states and the process's random states, by name."""
    states = {name: optimizer.state_dict()["state"] for name, optimizer in optimizers.items()}
    return _trained(critic) | flat(states) | _whole(policy_version)


def names(folder: Path, critic: nn.Module | None) -> set[str]:
    """The names of the stored entries. A ValueError says that only one of the two learners has a critic."""
    stored = tensor_names(folder)
    if any(name.startswith(CRITIC) for name in stored) != (critic is not None):
        raise ValueError("of this learner and the saved one only one has a critic; set credit.estimator back")
    return stored


def restore(folder: Path, stored: Set[str], critic: nn.Module | None, optimizers: Mapping[str, Optimizer]) -> int:
    """Loads the critic, optimisers and random states that were saved under the `stored` names.

    Returns the policy's version. Raises ValueError if the saved learner trained other weights.
    """
    states = {name: blank_state(optimizer) for name, optimizer in optimizers.items()}
    stored_states = {name: state for name, state in states.items() if any(flat({name: state}).keys() & stored)}
    process_entries = _whole(0)
    entries = _trained(critic) | flat(stored_states) | process_entries
    if differing := sorted(stored ^ entries.keys()):
        raise ValueError(f"the state is of a model that trains other weights, {differing[0]} for one; train it again")
    load_tensors(folder, entries)
    for name, state in stored_states.items():
        take_state(optimizers[name], state)
    torch.set_rng_state(process_entries[TORCH_RANDOM])
    random.setstate((random.getstate()[0], tuple(process_entries[PYTHON_RANDOM].tolist()), None))
    return int(process_entries[VERSION])


def _whole(policy_version: int) -> dict[str, Tensor]:
    """The entries that every rank has whole."""
    _, python_random, _ = random.getstate()
    return {
        VERSION: torch.tensor(policy_version),
        TORCH_RANDOM: torch.get_rng_state(),
        PYTHON_RANDOM: torch.tensor(python_random),
    }


def _trained(critic: nn.Module | None) -> dict[str, Tensor]:
    """The critic's own weights that train; loading fills them."""
    trained = trained_state(critic) if critic else {}
    return {f"{CRITIC}{name}": weight for name, weight in trained.items()}
