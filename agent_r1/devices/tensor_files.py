"""Files of tensors, in the format of safetensors, written tensor by tensor and hashed meanwhile."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

TYPES = {torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Writes a file of the bytes that safetensors would write, until it is on disk; returns its sha256.

    One tensor at a time is copied from its device, and the other threads of the process go on.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {**metadata}}
    for name, end in zip(names, itertools.accumulate(tensors[name].nbytes for name in names), strict=True):
        kind, shape, start = TYPES[tensors[name].dtype], [*tensors[name].shape], end - tensors[name].nbytes
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begin: list[Any] = [len(text).to_bytes(8, "little") + text]
    contents = (tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data for name in names)
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as hashing:
        for piece in itertools.chain(begin, contents):
            hashed = hashing.submit(digest.update, piece)
            file.write(piece)
            hashed.result()
            del piece  # before the next tensor is copied
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


class ShardWriter(HuggingFaceStorageWriter):
    """Writes a rank's part of a checkpoint as PyTorch does, which makes the bytes of a whole file before."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.hashes: dict[str, str] = {}  # of the file that was written, by its name

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # a file has a header of its own
        if plan.items:
            parts = {each.index.fqn: cast(TensorWriteData, each.tensor_data).chunk for each in plan.items}
            offsets = {name: {"saved_offsets": part.offsets} for name, part in parts.items()}
            metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
            tensors = {each.index.fqn: cast(Tensor, planner.resolve_data(each)) for each in plan.items}
            self.hashes[name] = write(Path(self.path) / name, tensors, metadata)
        return done
