"""Models whose weights are shared out among ranks: of every tensor each keeps a part, and all gather it to compute.

It is PyTorch's FSDP2. Tensors that are shared out are DTensors, and tell by that what is to be done with them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


class Backbone(nn.Module):
    """A policy that is called as its backbone alone.

    FSDP gathers the weights outside of the layers at this one call of a micro-batch. They stay until its backward pass,
    so that the output layer may be asked for as many chunks as this rank has: gathering is the work of all ranks.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, **inputs: Any) -> Any:
        return self.policy.get_decoder()(**inputs)


def share_out(model: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
    """Leaves this rank its part of the model, by layers; the rest is gathered at the model's calls."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in [*layers, model]:
        kept = reshard_after_forward or module is not model
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=kept)
        sharded.set_gradient_divide_factor(1.0)  # losses are divided already, by what all ranks have
        sharded.set_force_sum_reduction_for_comms(True)
        # A gathered weight trains if this one does when it is gathered first, which adapters that are left out do not.
        sharded.unshard()
        sharded.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every rank asks for it at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(state: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """All of each tensor of a state, one after the other and on the CPU; nothing where it is not to be kept."""
    found = {}
    for name, tensor in state.items():
        entire = whole(tensor)
        if keep:
            found[name] = entire.cpu()
    return found


def parts(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Of a state with all of each tensor this rank's parts, as the model has them."""
    own = model.state_dict()
    return {name: _part(tensor, own[name]) if name in own else tensor for name, tensor in state.items()}


def _part(tensor: Tensor, own: Tensor) -> Tensor:
    if not isinstance(own, DTensor):
        return tensor
    # src_data_rank None: every rank has read the whole, and takes its own part of that
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def is_shared_out(model: nn.Module) -> bool:
    """Whether this rank has but a part of the model."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def norm_of(gradients: Tensor) -> float:
    """A norm of gradients that may be shared out, as a number."""
    return float(whole(gradients).item())


def release(model: nn.Module) -> None:
    """Lets go of what was gathered of the weights outside of the layers."""
    if isinstance(model, torch.distributed.fsdp.FSDPModule):
        model.reshard()


def save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors; of those that are shared out every rank its own part. Raises OSError as writing does."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _own_faults():
        state_dict_saver.save({**tensors}, storage_writer=writer, no_dist=not dist.is_initialized())


def load(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fills tensors with those of the same names, whichever ranks wrote them. A ValueError names one that differs."""
    reader = HuggingFaceStorageReader(str(folder))
    with _own_faults():
        state_dict_loader.load({**into}, storage_reader=reader, no_dist=not dist.is_initialized())


def names(folder: Path) -> set[str]:
    """The names of the tensors in a folder."""
    return {*HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata}


@contextmanager
def _own_faults() -> Iterator[None]:
    """Raises what went wrong as what it was: DCP wraps all of it, an interrupt too, into a fault of its own."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of a process alone
            yield
    except CheckpointException as fault:
        cause, _ = fault.failures[min(fault.failures)]
        raise cause from fault
