"""The contract of a search index, and its passages on disk."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from agent_r1.files import remove_folder
from agent_r1.params import fingerprint
from agent_r1.records import Passage
from agent_r1.tables import SCHEMAS, check_schema, open_rows, whole

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

    def rank_all(self, queries: Sequence[str], k: int) -> list[Positions]:
        """`rank` of each query, where together they cost less."""
        return [self.rank(query, k) for query in queries]


def read_batches(path: Path, size: int | None = None) -> Iterator[pa.RecordBatch]:
    """The passages of a Parquet file, `size` (by default `BATCH`) at a time, in their order."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; run the prepare stage (`dvc repro prepare`)")
    with open_rows(path) as file:
        check_schema(path, file.schema_arrow, SCHEMAS[Passage])
        for batch in file.iter_batches(size or BATCH, columns=SCHEMAS[Passage].names):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=SCHEMAS[Passage])


def workplace(cache: Path, *identity: Any) -> Path:
    """A folder in `cache` for what a build may go on from, named by all that decides it; folders of others go."""
    place = cache / fingerprint(*identity)
    place.mkdir(parents=True, exist_ok=True)
    for stale in set(cache.iterdir()) - {place}:
        remove_folder(stale)
    return place


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


def open_arrow(path: Path) -> pa.Table:
    """A memory-mapped Arrow file. Raises ValueError for one whose offsets or characters cannot be."""
    with whole(path):
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        table.validate(full=True)
    return table


class Passages:
    """A memory-mapped Arrow file: a passage costs memory only while it is read."""

    def __init__(self, path: Path) -> None:
        self._table = open_arrow(path)

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


def parted(contents: str) -> tuple[str, str]:
    """Title and text of a passage whose first line is its title, in quotation marks or without (FlashRAG)."""
    title, _, text = contents.strip().partition("\n")
    title = title.strip()
    return title[1:-1] if re.fullmatch('".+"', title) else title, text.strip()


def named_by_content(title: str, text: str) -> Passage:
    """A passage whose id depends on it alone, and not on its file."""
    return Passage(passage_id=content_id(title, text), title=title, text=text)


def content_id(title: str, text: str) -> str:
    """The id of a passage that brought none along."""
    return hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=8).hexdigest()


def one_line(text: str) -> str:
    """A text with single blanks, as tools show it."""
    return " ".join(text.split())
