"""The contract of a search index, and its passages on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from agent_r1.records import Passage
from agent_r1.tables import SCHEMAS, check_schema, open_rows

Positions = NDArray[np.int64]  # of passages in their corpus, from 0
BATCH = 16_384  # passages: some ten megabytes of text


class Search(Protocol):
    """An index over passages."""

    @property
    def waits(self) -> bool:
        """Whether a search waits for another process; it may then be asked from several threads at once."""
        return False

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For each query its `k` best passages, fewer if fewer match. A WorldFault says that nothing answers."""
        ...

    def read(self, title: str) -> list[Passage]:
        """The passages of a title, of which blanks do not count, in their order; none where none has it.

        Raises WorldFault if nothing answers, and ValueError if the index is none that finds titles.
        """
        raise ValueError(f"{type(self).__name__} finds no passages by their title; set env.tools.read to null")


class Ranker(Protocol):
    """The part of an index that ranks passages by position, without their texts."""

    def rank(self, query: str, k: int) -> Positions:
        """Positions of the `k` best passages, best first, fewer where fewer match.

        Depends on the query alone, and equal scores rank in the order of the passages: a search has one result, in any
        company.
        """
        ...


def read_batches(path: Path, size: int | None = None) -> Iterator[pa.RecordBatch]:
    """The passages of a Parquet file, `size` (by default `BATCH`) at a time, in their order."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; run the prepare stage (`dvc repro prepare`)")
    with open_rows(path) as file:
        check_schema(path, file.schema_arrow, SCHEMAS[Passage])
        for batch in file.iter_batches(size or BATCH, columns=SCHEMAS[Passage].names):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=SCHEMAS[Passage])


def full_texts(batch: pa.RecordBatch, separator: str) -> list[str]:
    """Title and text of each passage, as an index reads them."""
    titles = batch.column("title").to_pylist()
    texts = batch.column("text").to_pylist()
    return [f"{title}{separator}{text}" for title, text in zip(titles, texts, strict=True)]


def store(source: Path, target: Path) -> int:
    """Copies passages from Parquet to an uncompressed Arrow file, which `Passages` maps; returns how many."""
    count = 0
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, SCHEMAS[Passage]) as writer:
        for batch in read_batches(source):
            writer.write_batch(batch)
            count += batch.num_rows
    return count


class Passages:
    """A memory-mapped Arrow file: a passage costs memory only while it is read."""

    def __init__(self, path: Path) -> None:
        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()

    def at(self, positions: Positions) -> list[Passage]:
        """The passages at some positions, in that order."""
        columns = {name: self._table.column(name) for name in SCHEMAS[Passage].names}
        return [Passage(**{name: column[int(i)].as_py() for name, column in columns.items()}) for i in positions]

    def of_title(self, title: str) -> list[Passage]:
        """The passages of a title, in their order."""
        title = one_line(title)
        return [
            passage
            for passage in self.at(np.flatnonzero(self._keys == hash(title)))
            if one_line(passage.title) == title
        ]

    @cached_property
    def _keys(self) -> Positions:
        """[N] a number for the title of each passage."""
        titles: Iterator[Any] = (title for chunk in self._table.column("title").chunks for title in chunk.to_pylist())
        return np.fromiter((hash(one_line(title)) for title in titles), np.int64, len(self._table))


def one_line(text: str) -> str:
    """A text with single blanks, as tools show it."""
    return " ".join(text.split())
