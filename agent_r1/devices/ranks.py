"""The processes that share one learner: a leader that runs the training, and followers that do what its learner does.

Each computes its part of every micro-batch's turn, and keeps its part of the weights. What all of them do is decided by
the leader alone; how it is dealt out follows from the lengths of the trajectories.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from agent_r1.devices.gpus import default_device
from agent_r1.params.update import UpdateParams

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """A call of the leader's that the followers make on their learners too."""

    verb: Callable[..., Any]
    arguments: Sequence[Any]  # without the learner
    options: Mapping[str, Any]
    params: UpdateParams  # what the leader has set on its learner by now, and the next too
    seed: int


class Ranks:
    """What a learner asks of the others that share it; here there are none, and it has all for itself."""

    rank = 0  # of this process; the leader's is 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this process runs the training, and writes what is written once."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return default_device()

    def loads_on(self, device: torch.device) -> torch.device:
        """Where a model is whole before it is shared out."""
        return device

    def tell(self, order: Order) -> None:
        """Has the followers do what the leader is about to do."""

    def gather(self, mine: Sequence[T]) -> list[T]:
        """What all of them have, those of the leader first; their tensors are on the CPU."""
        return [*mine]

    def join(self, mine: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """Arrays of which every entry is one rank's, and 0 in those of the others."""
        return [*mine]

    def share_out(self, model: nn.Module) -> None:
        """Leaves each of them a part of the weights; gradients are those of all their losses added up."""

    def backbone(self, policy: PreTrainedModel) -> nn.Module:
        """What is called to have a policy's backbone see contexts; whatever follows has all other weights at hand."""
        backbone: nn.Module = policy.get_decoder()
        return backbone

    def let_go(self, policy: PreTrainedModel) -> None:
        """Lets go of what `backbone` gathered, where no backward pass does that."""


ALONE = Ranks()


class Led(Protocol):
    """Something that every rank has, and whose calls the leader decides on."""

    ranks: Ranks
    params: UpdateParams
    seed: int


L = TypeVar("L", bound=Led)


def led(verb: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """Makes a verb of a learner one that all ranks do together, with the leader's arguments; it calls no other."""

    @functools.wraps(verb)
    def call(learner: L, *args: P.args, **kwargs: P.kwargs) -> R:
        learner.ranks.tell(Order(call, args, kwargs, learner.params, learner.seed))
        return verb(learner, *args, **kwargs)

    return cast(Callable[Concatenate[L, P], R], call)
