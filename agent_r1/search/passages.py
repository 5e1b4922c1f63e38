"""Passages on disk: read in batches, and by position from a memory-mapped file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agent_r1.records import Passage
from agent_r1.search.base import Positions
from agent_r1.tables import SCHEMAS, check_schema

BATCH = 16_384  # passages: some ten megabytes of text


def read_batches(path: Path, size: int | None = None) -> Iterator[pa.RecordBatch]:
    """The passages of a Parquet file, `size` (by default `BATCH`) at a time, in their order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else than passages.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; run the prepare stage (`dvc repro prepare`)")
    with pq.ParquetFile(path) as file:
        check_schema(path, file.schema_arrow, SCHEMAS[Passage])
        for batch in file.iter_batches(size or BATCH, columns=SCHEMAS[Passage].names):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=SCHEMAS[Passage])


def full_texts(batch: pa.RecordBatch, separator: str) -> list[str]:
    """Title and text of each passage, what an index looks at."""
    titles, texts = batch.column("title").to_pylist(), batch.column("text").to_pylist()
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
    """A memory-mapped Arrow file: a passage costs memory while it is looked at."""

    def __init__(self, path: Path) -> None:
        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()

    def at(self, positions: Positions) -> list[Passage]:
        """The passages at some positions, in the order of these."""
        columns = {name: self._table.column(name) for name in SCHEMAS[Passage].names}
        return [Passage(**{name: column[int(i)].as_py() for name, column in columns.items()}) for i in positions]
