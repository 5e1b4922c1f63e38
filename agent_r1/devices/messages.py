"""Messages between ranks: JSON, and tensors as safetensors, so that no code runs when one is read."""

from __future__ import annotations

import enum
import functools
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from pydantic import BaseModel
from safetensors.torch import load, save
from torch import Tensor

_KIND = "\0"  # the key that names the type of an object for which JSON has no form
_TEXT = "json"  # the name of the message itself, beside a tensor for each type of number


def packed(message: Any) -> bytes:
    """A message as bytes: what JSON has a form for, arrays, tensors, paths, dataclasses and sections of params.yaml.

    Raises TypeError for anything else. A tuple arrives as a list.
    """
    columns, taken = defaultdict[str, list[Tensor]](list), Counter[str]()

    def plain(part: Any) -> Any:
        match part:
            case np.ndarray() | Tensor():
                is_array = isinstance(part, np.ndarray)
                tensor = torch.tensor(part) if is_array else part.detach().cpu()  # rows of Parquet are read-only
                column = str(tensor.dtype)
                place = [column, taken[column], [*tensor.shape]]
                columns[column].append(tensor.flatten())
                taken[column] += tensor.numel()
                return {_KIND: "array" if is_array else "tensor", "place": place}
            case np.generic():
                return part.item()
            case Path():
                return {_KIND: "path", "path": str(part)}
            case BaseModel():
                return {_KIND: type(part).__name__, **part.model_dump()}
            case _ if is_dataclass(part):
                return {_KIND: type(part).__name__, **{each.name: getattr(part, each.name) for each in fields(part)}}
        raise TypeError(f"a {type(part).__name__} is no part of a message between ranks")

    text = torch.frombuffer(bytearray(json.dumps(message, default=plain).encode()), dtype=torch.uint8)
    return save({_TEXT: text} | {column: torch.cat(pieces) for column, pieces in columns.items()})


def opened(data: bytes, kinds: Sequence[type]) -> Any:
    """The message in bytes; `kinds` are the dataclasses and sections that it may hold."""
    columns = load(data)
    known = {kind.__name__: kind for kind in kinds}

    def built(part: dict[str, Any]) -> Any:
        match part.pop(_KIND, None):
            case None:
                return part
            case "path":
                return Path(part["path"])
            case "array" | "tensor" as kind:
                column, at, shape = part["place"]
                tensor = columns[column][at : at + int(np.prod(shape))].view(shape)
                return tensor if kind == "tensor" else tensor.numpy()
            case name:
                return _build(known[name], part)

    return json.loads(columns.pop(_TEXT).numpy().tobytes(), object_hook=built)


def _build(kind: type, found: Mapping[str, Any]) -> Any:
    if issubclass(kind, BaseModel):
        return kind.model_validate(found)
    return kind(**{**found, **{name: choice(found[name]) for name, choice in _choices(kind).items()}})


@functools.cache
def _choices(kind: type) -> dict[str, type[enum.Enum]]:
    """The fields of a dataclass that are enums, which JSON has as text."""
    return {name: hint for name, hint in get_type_hints(kind).items() if isinstance(hint, enum.EnumType)}
