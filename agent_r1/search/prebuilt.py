"""The vectors of a flat FAISS index that others built, such as Search-R1's e5_Flat.index: checked, and only mapped.

FAISS reads no byte of it. Source of the layout: github.com/facebookresearch/faiss, impl/index_write.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from struct import Struct

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agent_r1.records import Floats32, Int64s
from agent_r1.tables import open_rows

_HEADER = Struct("<4siqqq?iQ")  # kind, dimensions, vectors, two that nothing reads, if trained, metric, numbers behind
_FLAT = ((b"IxFI", 0), (b"IxF2", 1))  # kinds and metrics: inner product, and the square of the distance
UNIT = 0.01  # by which the length of a vector may differ from 1


class Prebuilt:
    """A vector for each passage of a corpus."""

    def __init__(self, path: Path, source: Path, dimensions: int) -> None:
        """Opens the index of the passages in a Parquet file; ValueError for another kind, shape, corpus or size."""
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; put the index there, or set search.dense.vectors to ''")
        self._path = path
        self._vectors = _mapped(path, dimensions)
        self._rows = self._rows_of(source)

    def shards(self, size: int) -> Iterator[Floats32]:
        """The vectors of all passages, so many at a time; a ValueError names one that is not of length 1."""
        for start in range(0, len(self._rows), size):
            rows = self._rows[start : start + size]
            vectors = np.asarray(self._vectors[rows], np.float32)
            lengths = np.linalg.norm(vectors, axis=1)
            wrong = np.flatnonzero(~(abs(lengths - 1) <= UNIT))  # nan too
            if len(wrong):
                raise ValueError(
                    f"{self._path}, vector {rows[wrong[0]]}: its length is {lengths[wrong[0]]:.3g}, and passages are "
                    "ranked by the cosine, of vectors of length 1; take an index of such, or set search.dense.vectors "
                    "to ''"
                )
            yield vectors

    def _rows_of(self, source: Path) -> Int64s:
        """The row of each passage: its id's distance from the first one's, or where ids are no numbers its position."""
        with open_rows(source) as file:
            ids = file.read(columns=["passage_id"]).column("passage_id")
        rows = np.arange(len(ids))
        with suppress(pa.ArrowInvalid):
            numbers = pc.cast(ids, pa.int64()).to_numpy()
            rows = numbers - numbers[0]
        if rows[-1] + 1 != len(self._vectors) or (np.diff(rows) <= 0).any():
            raise ValueError(
                f"{self._path} has {len(self._vectors)} vectors, and the corpus {len(ids)} passages whose ids, from "
                f"{ids[0]} to {ids[-1]}, are not its rows in order; prepare the corpus that it was built of, alone, or "
                "set search.dense.vectors to '' to encode"
            )
        return rows


def _mapped(path: Path, dimensions: int) -> Floats32:
    """The vectors of a flat index [N, dimensions]."""
    with path.open("rb") as file:
        kind, width, count, *_, metric, _ = _HEADER.unpack(file.read(_HEADER.size).ljust(_HEADER.size, b"\0"))
    if (kind, metric) not in _FLAT:
        raise ValueError(
            f"{path} is an index of FAISS's kind {kind!r} and metric {metric}; vectors are taken from flat ones alone "
            "(IxFI, IxF2, by inner product or distance); take one, or set search.dense.vectors to '' to encode"
        )
    if width != dimensions:
        raise ValueError(
            f"{path} has vectors of {width} dimensions, and search.dense.encoder gives {dimensions}; name the encoder "
            "that made them"
        )
    size = path.stat().st_size
    need = _HEADER.size + 4 * width * count
    if count < 1 or size != need:
        raise ValueError(
            f"{path} has {size} bytes, and by its header, of {count} vectors, {need}: it is cut off, or no such index; "
            "download it again"
        )
    return np.memmap(path, np.float32, "r", _HEADER.size, (count, width))
