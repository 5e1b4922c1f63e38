"""The ranks of one learner: processes that share its work and its weights.

The leader runs the training, and followers repeat its calls on their learners. Each rank computes its part of every
turn of micro-batches, which the trajectories' lengths alone decide, and keeps its shard of the weights by PyTorch's
FSDP2: a sharded tensor is a DTensor. A message between ranks is JSON, its tensors safetensors: reading it runs no code.
"""

from __future__ import annotations

import enum
import functools
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_r1.devices.tensor_files import ShardWriter
from agent_r1.params.env import EnvParams
from agent_r1.params.train import UpdateParams
from agent_r1.pretrained import default_device, waiting
from agent_r1.records import Call, Credit, Floats32, Step, Trajectory

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_KIND = "\0"  # the key of a message that names the type of an object for which JSON has no form
# Verb by its name. Followers run no others.
_VERBS: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class LedCall:
    """A call of the leader that the followers repeat on their learners."""

    verb: str
    arguments: Sequence[Any]  # without the learner
    options: Mapping[str, Any]
    params: UpdateParams  # the leader's current ones, as is the seed
    seed: int


_SENT = (LedCall, Trajectory, Step, Call, Credit, UpdateParams, EnvParams)  # with a call


class Ranks:
    """The view that a learner has of the ranks that share it. This one is of a learner in a single process."""

    rank = 0  # of this process; the leader's is 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this process runs the training, and writes the files that are written once."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return default_device()

    def tell(self, call: LedCall) -> None:
        """Has the followers repeat the leader's next call."""

    def gather(self, entries: Sequence[T], *kinds: type) -> list[T]:
        """The entries of all ranks, the leader's first. Their tensors are on the CPU, and `kinds` their dataclasses."""
        return [*entries]

    def join(self, arrays: Sequence[Floats32]) -> list[Floats32]:
        """Joins arrays in which every entry is computed by one rank and 0 in the others."""
        return [*arrays]

    def share_out(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Leaves each rank a shard of the weights, which compute in `dtype`. Their gradients add up over all ranks."""

    def backbone(self, policy: PreTrainedModel) -> nn.Module:
        """The module to call as the policy's backbone. The call gathers all weights outside of the layers."""
        backbone: nn.Module = policy.get_decoder()
        return backbone

    def let_go(self, policy: PreTrainedModel) -> None:
        """Frees the weights that `backbone` gathered, where no backward pass does."""

    def reduce(self, model: nn.Module, *, last: bool) -> None:
        """Says whether the next backward pass is the last one before an optimiser step."""


ALONE = Ranks()


class Group(Ranks):
    """The ranks of one learner, each a process with a device of its own. `meeting.joined` builds it."""

    def __init__(self, device: torch.device, host: dist.ProcessGroup, *, copies: int = 1, defers: bool = False) -> None:
        """`host` is a group on the CPU. Ranks next to each other share one of the `copies` of the weights.

        Gradients are summed over the ranks after every backward pass or, where the group `defers`, after the last one.
        """
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = device
        self._host = host
        whole_mesh = init_device_mesh(device.type, (copies, self.size // copies), mesh_dim_names=("copies", "shards"))
        self._mesh = whole_mesh if copies > 1 else whole_mesh["shards"]
        self._defers = defers
        self._backbones = dict[PreTrainedModel, Backbone]()

    @property
    def device(self) -> torch.device:
        return self._device

    def tell(self, call: LedCall | None) -> None:
        if self.leads:
            sent = torch.frombuffer(bytearray(packed(call)), dtype=torch.uint8)
            for tensor in (torch.tensor([len(sent)]), sent):
                dist.broadcast(tensor, src=0, group=self._host)

    def dismiss(self) -> None:
        """Lets the followers end."""
        self.tell(None)

    def hear(self) -> LedCall | None:
        """The leader's next call; None after the last one."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._host)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._host)
        call: LedCall | None = opened(data.numpy().tobytes(), _SENT)
        return call

    def follow(self, learner: Led) -> None:
        """Repeats on a follower's learner the leader's calls, until the leader dismisses the followers."""
        while call := self.hear():
            learner.params = call.params
            learner.seed = call.seed
            _VERBS[call.verb](learner, *call.arguments, **call.options)

    def gather(self, entries: Sequence[T], *kinds: type) -> list[T]:
        data = torch.frombuffer(bytearray(packed([*entries])), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._host)
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(data)] = data
        buffers = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(buffers, padded, group=self._host)
        messages = [buffer[: int(size)].numpy().tobytes() for buffer, size in zip(buffers, sizes, strict=True)]
        return [entry for message in messages for entry in opened(message, kinds)]

    def join(self, arrays: Sequence[Floats32]) -> list[Floats32]:
        added = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *arrays]))
        dist.all_reduce(added, group=self._host)
        return np.split(added.numpy(), np.cumsum([len(array) for array in arrays])[:-1]) if arrays else []

    def share_out(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Shards layer by layer. A policy keeps the weights outside of its layers gathered until its backward pass.

        Weights are gathered in `dtype`, so that autocast casts none and keeps none; their gradients are added up in
        float32. Norms, rotary positions and the residual stream stay in the precision that they have in one process.
        """
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.weight.dtype is torch.float32:
                module.register_forward_hook(_in_float32)
            if isinstance(module, nn.LayerNorm) and module.elementwise_affine:  # on a CPU it takes one type alone
                module.register_forward_pre_hook(_in_type_of_weight)
        root = model
        if isinstance(model, PreTrainedModel):
            root = self._backbones[model] = Backbone(model)
        layers = [module for module in root.modules() if isinstance(module, GradientCheckpointingLayer)]
        for module in [*layers, root]:
            stored = waiting(module)
            reshards = not isinstance(module, Backbone)
            sharded = fully_shard(module, mesh=self._mesh, reshard_after_forward=reshards, mp_policy=precision)
            sharded.set_gradient_divide_factor(1.0)  # losses are divided already, by the counts of all ranks
            sharded.set_force_sum_reduction_for_comms(True)
            module.load_state_dict(parts(stored, module), strict=False)
            # The first gathering decides whether a gathered weight trains; adapters that are left out then would not.
            sharded.unshard()
            sharded.reshard()

    def backbone(self, policy: PreTrainedModel) -> nn.Module:
        return self._backbones[policy]

    def let_go(self, policy: PreTrainedModel) -> None:
        cast(FSDPModule, self._backbones[policy]).reshard()

    def reduce(self, model: nn.Module, *, last: bool) -> None:
        if self._defers:
            root = self._backbones[model] if isinstance(model, PreTrainedModel) else model
            cast(FSDPModule, root).set_requires_gradient_sync(last)


def _in_float32(_: nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
    return embedded.float()


def _in_type_of_weight(norm: nn.Module, inputs: Any) -> Any:
    return inputs[0].to(norm.weight.dtype), *inputs[1:]


class Backbone(nn.Module):
    """A policy that is called as its backbone alone.

    FSDP gathers the weights outside of the layers at this one call of a micro-batch, and keeps them until its backward
    pass. Gathering is the work of all ranks, while each rank has its own number of chunks for the output layer.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, **inputs: Any) -> Any:
        return self.policy.get_decoder()(**inputs)


class Led(Protocol):
    """A learner of every rank, whose calls the leader decides on."""

    ranks: Ranks
    params: UpdateParams
    seed: int


L = TypeVar("L", bound=Led)


def led(verb: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """Makes a verb of a learner one that all ranks run together, with the leader's arguments. It calls no other one."""

    @functools.wraps(verb)
    def call(learner: L, *args: P.args, **kwargs: P.kwargs) -> R:
        learner.ranks.tell(LedCall(verb.__qualname__, args, kwargs, learner.params, learner.seed))
        return verb(learner, *args, **kwargs)

    _VERBS[verb.__qualname__] = verb
    return cast(Callable[Concatenate[L, P], R], call)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one. Every rank asks for it at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(state: Mapping[str, Tensor], *, keep: bool, halved: Collection[str] = ()) -> dict[str, Tensor]:
    """The full tensors of a state on the CPU, some in bfloat16, gathered one by one; none if not to be kept."""
    entire = ((name, whole(tensor.bfloat16() if name in halved else tensor)) for name, tensor in state.items())
    return {name: tensor.cpu() for name, tensor in entire if keep}


def parts(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """This rank's shard of every tensor of a full state dict, as the model is sharded."""
    shards = model.state_dict()
    return {name: _part(tensor, shards.get(name)) for name, tensor in state.items()}


def _part(tensor: Tensor, shard: Tensor | None) -> Tensor:
    if not isinstance(shard, DTensor):
        return tensor
    # src_data_rank None: every rank has read the full tensor, and takes its own shard of it
    return distribute_tensor(tensor.to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None)


def is_sharded(model: nn.Module) -> bool:
    """Whether this rank has only a shard of the model."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks = ALONE) -> dict[str, str]:
    """Writes tensors; every rank writes its own shards. Raises OSError as writing does.

    Gives the sha256 of every rank's file by its path from the folder's parent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder)
    with _own_faults():
        state_dict_saver.save({**tensors}, storage_writer=writer, no_dist=not dist.is_initialized())
    return {f"{folder.name}/{name}": digest for name, digest in ranks.gather([*writer.hashes.items()])}


def load_tensors(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fills tensors by name with the stored ones, whichever ranks wrote them. A ValueError names one that differs."""
    reader = HuggingFaceStorageReader(str(folder))
    with _own_faults():
        state_dict_loader.load({**into}, storage_reader=reader, no_dist=not dist.is_initialized())


def tensor_names(folder: Path) -> set[str]:
    """The names of the tensors in a folder."""
    return {*HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata}


@contextmanager
def _own_faults() -> Iterator[None]:
    """Raises the cause of a fault: DCP wraps every one, an interrupt too, into a fault of its own."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of a process alone
            yield
    except CheckpointException as fault:
        cause, _ = fault.failures[min(fault.failures)]
        raise cause from fault


def packed(message: Any) -> bytes:
    """Plain values, arrays, tensors, paths, dataclasses and sections of params.yaml as bytes. A tuple becomes a list.

    Raises TypeError for other objects.
    """
    columns = defaultdict[str, list[Tensor]](list)  # by type of number
    sizes = Counter[str]()

    def plain(part: Any) -> Any:
        kind = type(part).__name__
        if isinstance(part, (np.ndarray, np.generic, Tensor)):
            tensor = part.detach().cpu() if isinstance(part, Tensor) else torch.tensor(np.asarray(part))
            column = str(tensor.dtype)
            kind = "tensor" if isinstance(part, Tensor) else "array"
            columns[column].append(tensor.flatten())
            sizes[column] += tensor.numel()
            return {_KIND: kind, "end": sizes[column], "column": column, "shape": tensor.shape}
        if isinstance(part, Path):
            return {_KIND: "path", "path": str(part)}
        if isinstance(part, BaseModel):
            return {_KIND: kind, **part.model_dump()}
        if is_dataclass(part):
            return {_KIND: kind, **{field.name: getattr(part, field.name) for field in fields(part)}}
        raise TypeError(f"a {kind} is no part of a message between ranks")

    text = torch.frombuffer(bytearray(json.dumps(message, default=plain), "utf-8"), dtype=torch.uint8)
    return save({"json": text, **{column: torch.cat(pieces) for column, pieces in columns.items()}})


def opened(data: bytes, kinds: Sequence[type]) -> Any:
    """The message in bytes; `kinds` are the dataclasses and sections that it may hold."""
    columns = load(data)
    kind_of = {kind.__name__: kind for kind in kinds}

    def built(part: dict[str, Any]) -> Any:
        match part.pop(_KIND, None):
            case None:
                return part
            case "path":
                return Path(part["path"])
            case "array" | "tensor" as kind:
                shape = torch.Size(part["shape"])
                end = part["end"]
                tensor = columns[part["column"]][end - shape.numel() : end].view(shape)
                return tensor if kind == "tensor" else tensor.numpy()[()]  # a number where it has no dimensions
            case name:
                choices = _choices(kind_of[name])
                return kind_of[name](**part | {field: choice(part[field]) for field, choice in choices.items()})

    return json.loads(columns["json"].numpy().tobytes(), object_hook=built)


@functools.cache
def _choices(kind: type) -> dict[str, Callable[[str], enum.Enum]]:
    """The enums among a type's fields, which JSON has as text."""
    return {name: hint for name, hint in get_type_hints(kind).items() if isinstance(hint, enum.EnumType)}
