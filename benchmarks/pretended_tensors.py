"""Tensors that say cuda:0 and are none, for what asks a tensor where it is; `pretended` starts a process with them.

All tensors that are made on cuda or moved there are `Pretended`, and compute on the CPU. An operation on tensors of two
devices raises `MixedDevices` where CUDA refuses it. After `count_alone` floating-point tensors have a shape alone, in
models of any size, and the bytes that live at once are counted. No kernel of CUDA runs, and there are no streams.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

CUDA, CPU, META = torch.device("cuda:0"), torch.device("cpu"), torch.device("meta")
GIB, ROUNDED = 2**30, 512  # bytes; CUDA's allocator gives multiples
aten = torch.ops.aten
MOVES = {aten.copy_.default, aten._to_copy.default}  # from one device to another
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class MixedDevices(RuntimeError):
    """An operation on tensors of which some are on the CPU, and some not."""


@dataclass
class Memory:
    """The bytes of the pretended device."""

    counted: bool = False
    live: int = 0
    peak: int = 0
    storages: dict[int, Any] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        """Counts a storage until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // ROUNDED) * ROUNDED
        if key in self.storages:
            return

        def freed(_: object) -> None:
            self.live -= size
            del self.storages[key]

        self.storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)

    def reset(self, device: Any = None) -> None:
        self.peak = self.live


MEMORY = Memory()


class Pretended(Tensor):
    """A tensor on cuda:0 to all who ask, around one that is elsewhere."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretended:
        made: Pretended = Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=CUDA
        )
        made.inner = inner
        if MEMORY.counted:
            MEMORY.add(inner)
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.inner!r})"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, Pretended):
            raise MixedDevices("a weight of cuda:0 was given data of the CPU")
        Tensor.data.__set__(self, other)
        self.inner = other.inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Pretends(TorchDispatchMode):
    """Has every operator pretend."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator's results, where CUDA would have them."""
    if torch.is_inference_mode_enabled():  # which leaves operators whole that are made of others
        with Pretends():
            if (found := func.decompose(*args, **kwargs)) is not NotImplemented:
                return found
    given: list[Tensor] = []
    mapped(given.append, (args, *kwargs.values()))
    ours = {id(each.inner): each for each in given if isinstance(each, Pretended)}
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if ours and func not in MOVES:
        refuse_mixed(func, args, given)
    to_cuda = device.type == "cuda" if device else bool(ours)
    if func is aten.copy_.default:
        to_cuda = isinstance(args[0], Pretended)
    if not to_cuda and not ours:
        return func(*args, **kwargs)
    if device and to_cuda:
        kwargs = {**kwargs, "device": CPU}
    args, kwargs = mapped(unwrapped, args), {name: mapped(unwrapped, value) for name, value in kwargs.items()}
    found = shaped(func, args, kwargs, given) if MEMORY.counted else func(*args, **kwargs)
    if not to_cuda or func is aten._local_scalar_dense.default:
        return found
    return mapped(lambda each: ours[id(each)] if id(each) in ours else Pretended(each), found)


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Changes every tensor in arguments or results."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(change, each) for each in value])
    return value


def unwrapped(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, Pretended) else tensor


def refuse_mixed(func: Any, args: tuple[Any, ...], given: list[Tensor]) -> None:
    """Raises MixedDevices where CUDA would. Single numbers and indices may be on the CPU."""
    if func in INDEXED:
        given = [each for each in (args[0], *args[2:]) if isinstance(each, Tensor)]
    for each in given:
        if not isinstance(each, Pretended) and each.dim():
            raise MixedDevices(f"{func} on cuda:0 was given a tensor {tuple(each.shape)} on {each.device}")


def shaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
    """An operator's results where numbers with a fraction have a shape alone, and all are 1."""
    if func is aten._local_scalar_dense.default:
        return 1.0 if args[0].is_meta else args[0].item()
    leaves = func is aten._to_copy.default and kwargs.get("device") == CPU and isinstance(given[0], Pretended)
    if leaves and args[0].is_meta:
        return torch.ones((), dtype=kwargs.get("dtype") or args[0].dtype).expand(args[0].shape)
    real: list[Tensor] = []
    mapped(real.append, (args, *kwargs.values()))
    dtype = kwargs.get("dtype") or (real[0].dtype if real else torch.float32)
    if not any(each.is_meta for each in real) and not dtype.is_floating_point:
        return func(*args, **kwargs)
    if func in INDEXED:
        places = [
            place
            for each in args[1]
            for place in (each.nonzero(as_tuple=True) if each is not None and each.dtype is torch.bool else [each])
        ]
        args = (args[0], places, *args[2:])
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": META}
    found = func(*mapped(as_shape, args), **{name: mapped(as_shape, value) for name, value in kwargs.items()})
    return mapped(lambda each: torch.ones(each.shape, dtype=each.dtype) if each.dtype is torch.bool else each, found)


def as_shape(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to(META)


def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, scale: float | None = None, **others: Any) -> Tensor:
    """The shapes that attention leaves behind on CUDA."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (each.to(torch.get_autocast_dtype("cuda")) for each in (query, key, value))
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)[0]


def attend_each(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    ends: Tensor,
    *_: Any,
    scale: Any,
    window_size: Any,
    enable_gqa: bool,
) -> Tensor:
    """Packed attention [t, H, D] by segments, as the kernel takes it: halved, with starts of 32 bits on the device.

    `starts` are of the queries and `ends` of the keys of each, whose last ones its queries stand at.
    """
    if not all(isinstance(each, Pretended) for each in (q, k, v, starts, ends)):
        raise MixedDevices("the kernel for packed contexts was given a tensor of the CPU")
    if {q.dtype, k.dtype, v.dtype} != {v.dtype} or v.dtype.itemsize != 2 or starts.dtype is not torch.int32:
        raise TypeError(f"the kernel for packed contexts was given {q.dtype}, {k.dtype}, {v.dtype}, {starts.dtype}")
    parts = [each.transpose(0, 1)[None] for each in (q, k, v)]
    if MEMORY.counted:
        return attend(*parts, scale=scale)[0].transpose(0, 1)
    found, (before, _) = [], window_size
    spans = ([slice(*pair) for pair in itertools.pairwise(bounds.tolist())] for bounds in (starts, ends))
    for queries, keys in zip(*spans, strict=True):
        places = torch.arange(keys.stop - keys.start, device=q.device)
        back = places[queries.start - queries.stop :, None] - places
        seen = (back >= 0) & ((back <= before) | (before < 0))
        pieces = [each[:, :, span] for each, span in zip(parts, (queries, keys, keys), strict=True)]
        found.append(F.scaled_dot_product_attention(*pieces, seen, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(found, 2)[0].transpose(0, 1)


def count_alone() -> None:
    """Gives what pretends from now on shapes alone, and counts their bytes."""
    MEMORY.counted = True
    F.scaled_dot_product_attention = attend


def begin() -> None:
    """Has this process pretend until it ends."""
    torch.__future__.set_swap_module_params_on_conversion(True)  # else tied weights come apart
    torch._C._set_only_lift_cpu_tensors(True)
    card = SimpleNamespace(total_memory=80 * GIB)
    stubs: dict[str, Any] = {
        "_lazy_init": None,
        "device_count": 1,
        "empty_cache": None,
        "synchronize": None,
        "mem_get_info": (80 * GIB, 80 * GIB),
        "get_device_properties": card,
        "is_bf16_supported": True,
        "get_rng_state": torch.empty(0, dtype=torch.uint8),
        "set_rng_state": None,
    }
    for name, value in stubs.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.reset_peak_memory_stats = MEMORY.reset
    torch.cuda.max_memory_reserved = torch.cuda.max_memory_allocated = lambda device=None: MEMORY.peak
    torch.cuda.memory_allocated = lambda device=None: MEMORY.live
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    varlen.varlen_attn = attend_each
    Pretends().__enter__()
