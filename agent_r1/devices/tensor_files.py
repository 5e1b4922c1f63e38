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
    ordered = {name: tensors[name] for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))}
    begin = [memoryview(_header(ordered, metadata))]
    contents = (tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data for tensor in ordered.values())
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as hashing:
        for piece in itertools.chain(begin, contents):
            update = hashing.submit(digest.update, piece)
            file.write(piece)
            update.result()
            piece.release()  # before the next tensor is copied, whenever the other thread lets go of it
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The beginning of the file: the length of a JSON, and that with the type, shape and place of every tensor."""
    header: dict[str, Any] = {"__metadata__": {**metadata}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class ShardWriter(HuggingFaceStorageWriter):
    """Writes a rank's part of a checkpoint as PyTorch does, which makes the bytes of a whole file before."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.hashes = dict[str, str]()  # of the file that was written, by its name

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result([])  # a file has a header of its own
        if plan.items:
            parts = {item.index.fqn: cast(TensorWriteData, item.tensor_data).chunk for item in plan.items}
            offsets = {name: {"saved_offsets": part.offsets} for name, part in parts.items()}
            metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
            tensors = {item.index.fqn: cast(Tensor, planner.resolve_data(item)) for item in plan.items}
            self.hashes[name] = write(Path(self.path) / name, tensors, metadata)
        return future
