"""Tensors in a folder of safetensors files, one for each rank, that any number of ranks reads its own parts of.

The format is that of PyTorch's distributed checkpoints (DCP) on Hugging Face storage: nothing in it is ever unpickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter


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
