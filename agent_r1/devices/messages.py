"""Messages between ranks: JSON, and tensors as safetensors, so that reading one runs no code."""

from __future__ import annotations

import enum
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from pydantic import BaseModel
from safetensors.torch import load, save
from torch import Tensor

_KIND = "\0"  # the key that names the type of an object for which JSON has no form


def packed(message: Any) -> bytes:
    """Plain values, arrays, tensors, paths, dataclasses and sections of params.yaml as bytes. A tuple becomes a list.

    Raises TypeError for other objects.
    """
    columns, taken = defaultdict[str, list[Tensor]](list), Counter[str]()  # by type of number

    def plain(part: Any) -> Any:
        kind = type(part).__name__
        if isinstance(part, (np.ndarray, np.generic, Tensor)):
            tensor = part.detach().cpu() if isinstance(part, Tensor) else torch.tensor(np.asarray(part))
            column, kind = str(tensor.dtype), "tensor" if isinstance(part, Tensor) else "array"
            columns[column].append(tensor.flatten())
            taken[column] += tensor.numel()
            return {_KIND: kind, "end": taken[column], "column": column, "shape": tensor.shape}
        if isinstance(part, Path):
            return {_KIND: "path", "path": str(part)}
        if isinstance(part, BaseModel):
            return {_KIND: kind, **part.model_dump()}
        if is_dataclass(part):
            return {_KIND: kind, **{each.name: getattr(part, each.name) for each in fields(part)}}
        raise TypeError(f"a {kind} is no part of a message between ranks")

    text = torch.frombuffer(bytearray(json.dumps(message, default=plain), "utf-8"), dtype=torch.uint8)
    return save({"json": text, **{column: torch.cat(pieces) for column, pieces in columns.items()}})


def opened(data: bytes, kinds: Sequence[type]) -> Any:
    """The message in bytes; `kinds` are the dataclasses and sections that it may hold."""
    columns, known = load(data), {kind.__name__: kind for kind in kinds}

    def built(part: dict[str, Any]) -> Any:
        match part.pop(_KIND, None):
            case None:
                return part
            case "path":
                return Path(part["path"])
            case "array" | "tensor" as kind:
                shape, end = torch.Size(part["shape"]), part["end"]
                tensor = columns[part["column"]][end - shape.numel() : end].view(shape)
                return tensor if kind == "tensor" else tensor.numpy()[()]  # a number where it has no dimensions
            case name:
                choices = _choices(known[name])
                return known[name](**part | {field: choice(part[field]) for field, choice in choices.items()})

    return json.loads(columns["json"].numpy().tobytes(), object_hook=built)


@cache
def _choices(kind: type) -> dict[str, Callable[[str], enum.Enum]]:
    """The enums among a type's fields, which JSON has as text."""
    return {name: hint for name, hint in get_type_hints(kind).items() if isinstance(hint, enum.EnumType)}
