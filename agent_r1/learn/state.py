"""What a learner goes on with besides its policy: the critic, both optimisers and the random states, in one folder."""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from agent_r1.devices import shards
from agent_r1.learn import adapter
from agent_r1.learn.optimizers import blank_state, flat, take_state

CRITIC = "critic."  # what the names of its weights begin with
VERSION, TORCH_RANDOM, PYTHON_RANDOM = "policy_version", "random.torch", "random.python"


def save(folder: Path, critic: nn.Module | None, optimizers: Mapping[str, Optimizer], policy_version: int) -> None:
    """Writes them, the random states those of the process; of a critic with adapters only what trains."""
    states = {name: optimizer.state_dict()["state"] for name, optimizer in optimizers.items()}
    shards.save(folder, _trained(critic) | flat(states) | _own(policy_version))


def names(folder: Path, critic: nn.Module | None) -> set[str]:
    """The names of what was saved. A ValueError says that only one of the saved learner and this one has a critic."""
    stored = shards.names(folder)
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
    shards.load(folder, found)
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
