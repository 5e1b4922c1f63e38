"""Data files row by row: a JSON list, JSON lines or Parquet, plain or gzipped, never a whole file in memory.

What is small on disk stays small in memory: rows have a longest length, and what is packed unpacks to a multiple of its
size.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import re
import reprlib
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from agent_r1.data.rows import DECODER, LONGEST_ROW, BrokenRowError, Row, decode, refuse_halves

logger = logging.getLogger(__name__)
T = TypeVar("T")

LINE_EVERY = 100_000  # items
ROWS = (".json", ".jsonl", ".parquet")  # with or without .gz behind
_CHUNK = 1 << 20  # characters
_BATCH, _BATCH_BYTES = 1024, 1 << 26  # rows of a Parquet file, and what they come to
_UNPACKED = 32  # times the size of a packed file, or _UNPACKED_BYTES where that is more
_UNPACKED_BYTES = 1 << 25
_DECODING = 8  # times what is unpacked: the memory to do it in
_OBJECT_BYTES = 16  # that a value takes besides its content
_BLANK, _COMMA, _END = re.compile(r"\s*"), re.compile(r"\s*,\s*"), re.compile(r"\s*\]")


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Passes items on: under a bar on a terminal, elsewhere with a log line every LINE_EVERY items."""
    bar = tqdm(items, desc=what, total=total, unit=" rows", disable=None, leave=False)
    for number, item in enumerate(bar, start=1):
        yield item
        if bar.disable and number % LINE_EVERY == 0:
            logger.info("%s: %d%s", what, number, f" of {total}" if total else "")


def data_files(location: Path, suffixes: tuple[str, ...] = ROWS) -> list[Path]:
    """The files of a location, which is a file, a folder (with all below it) or a pattern such as train-*.parquet.

    Raises FileNotFoundError if there is no such file or folder, or none that fits.
    """
    if location.is_dir():
        found = [path for path in location.rglob("*") if path.is_file() and suffix(path) in suffixes]
    else:
        found = [location] if location.exists() else [*location.parent.glob(location.name)]
    if not found:
        problem = f"holds no {', '.join(suffixes)} file" if location.is_dir() else "does not exist"
        raise FileNotFoundError(f"{location} {problem}; put the files there or correct prepare.files in params.yaml")
    return sorted(found)


def suffix(path: Path) -> str:
    """The last suffix before .gz."""
    return Path(path.name.removesuffix(".gz")).suffix


def read(location: Path) -> Iterator[Row]:
    """The rows of all files of a location, one after the other."""
    for path in data_files(location):
        yield from _read_file(path)


def count(location: Path) -> int:
    """How many rows `read` gives. Raises what `read` does, and ValueError if there is not a single row."""
    total = 0
    for path in data_files(location):
        if suffix(path) == ".parquet":
            with _open_parquet(path) as file:
                total += int(file.metadata.num_rows)
        else:
            total += sum(1 for _ in progress(_read_file(path), f"counting {path.name}"))
    if not total:
        raise ValueError(f"{location} holds no rows; download it again or correct prepare.files in params.yaml")
    return total


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A file as text, unzipped where its name ends in .gz.

    Raises ValueError if it is not UTF-8, or not a whole gzip file, or one that unpacks to too much.
    """
    try:
        with (
            _Unzipped(path) if path.suffix == ".gz" else path.open("rb") as file,
            TextIOWrapper(file, encoding="utf-8-sig") as text,
        ):
            yield text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); download it again") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8 ({error}); download it again or convert it") from None


class _Unzipped(gzip.GzipFile):
    """A gzip file that is read up to the size of an honest one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._room = _room(path)

    def read1(self, size: int = -1) -> bytes:
        piece = super().read1(size)
        if self.tell() > self._room:
            raise ValueError(f"{self.name}: unpacks to more than {self._room >> 20} MiB; if it should, unpack it")
        return piece


def _room(path: Path) -> int:
    """The bytes that a packed file may come to."""
    return max(_UNPACKED * path.stat().st_size, _UNPACKED_BYTES)


def pieces(text: TextIO) -> Iterator[str]:
    """The lines of a text; one that is longer than LONGEST_ROW in pieces of that length."""
    return iter(partial(text.readline, LONGEST_ROW), "")


@contextmanager
def _open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole Parquet file ({error}); download it again") from None


def _read_file(path: Path) -> Iterator[Row]:
    number = 0
    try:
        for number, fields in enumerate(_values(path), start=1):
            if not isinstance(fields, dict):
                found = reprlib.repr(fields)
                raise ValueError(f"{path}, row {number}: expected an object with named fields, found {found}")
            yield Row(fields, path, number)
    except BrokenRowError as error:
        raise ValueError(f"{path}, row {number + 1}: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ValueError(
            f"{path}, row {number + 1}: broken or cut off ({problem}); expected a JSON list of objects or one "
            "object per line; download the file again"
        ) from None


def _values(path: Path) -> Iterator[Any]:
    if suffix(path) == ".parquet":
        yield from _parquet_rows(path)
        return
    with open_text(path) as text:
        is_list = text.read(_CHUNK).lstrip().startswith("[")
        text.seek(0)
        yield from _list_items(text) if is_list else (decode(line) for line in pieces(text) if line.strip())


def _parquet_rows(path: Path) -> Iterator[Any]:
    room, taken = _room(path), 0
    with _open_parquet(path) as file:
        rows = _batch_size(file.metadata)
        _try(path, _DECODING * room >> 20, rows)
        for batch in file.iter_batches(rows, use_threads=False):
            taken += (weight := sum(map(_weight, batch.columns)))
            if taken > room:
                raise BrokenRowError(f"the file unpacks to more than {room >> 20} MiB; write it as JSON lines instead")
            yield from _fields(batch, weight)


def _try(path: Path, mebibytes: int, rows: int) -> None:
    """Raises ValueError if the rows of a file, so many at a time, cannot be decoded in so much memory."""
    command = [sys.executable, "-m", "agent_r1.data.trial", str(path.absolute()), str(mebibytes), str(rows)]
    trial = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    if trial.returncode:
        row = int((trial.stdout.splitlines() or ["0"])[-1]) + 1
        raise ValueError(
            f"{path}, row {row}: cannot be decoded in {mebibytes} MiB of memory, with those read with it; write it as "
            "JSON lines instead"
        )


def _weight(column: pa.Array[Any]) -> int:
    """About the bytes that a column takes as Python's objects, however few it has in Arrow."""
    match column:
        case pa.StructArray():
            inner = sum(map(_weight, column.flatten()))
        case pa.ListArray() | pa.LargeListArray() | pa.FixedSizeListArray():
            inner = _weight(column.flatten())
        case pa.DictionaryArray():
            inner = len(column) * column.dictionary.nbytes // max(1, len(column.dictionary))
        case _:
            inner = column.nbytes
    return inner + _OBJECT_BYTES * len(column)


def _batch_size(metadata: pq.FileMetaData) -> int:
    """Rows that come to _BATCH_BYTES by what the file says of itself."""
    claimed = sum(metadata.row_group(at).total_byte_size for at in range(metadata.num_row_groups))
    return max(1, min(_BATCH, _BATCH_BYTES * metadata.num_rows // max(1, claimed)))


def _fields(batch: pa.RecordBatch, weight: int) -> Iterable[Any]:
    """The rows of a batch; one by one where one of them is too long or broken, so that its number is known."""
    if weight <= LONGEST_ROW:
        with contextlib.suppress(ValueError, OverflowError):
            return batch.to_pylist()
    return (_alone(batch.slice(at, 1)) for at in range(batch.num_rows))


def _alone(row: pa.RecordBatch) -> Any:
    if sum(map(_weight, row.columns)) > LONGEST_ROW:
        raise BrokenRowError(f"longer than {LONGEST_ROW} bytes")
    try:
        return row.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        raise BrokenRowError(f"a value cannot be read ({error})") from None


def _list_items(text: TextIO) -> Iterator[Any]:
    """The values of a JSON list, out of a window of its text that grows until the next value in it is whole."""
    held = text.read(_CHUNK)
    at, lead = held.index("[") + 1, _BLANK
    while not (end := _END.match(held, at)):
        try:
            start = lead.match(held, at)
            if not start:
                raise json.JSONDecodeError("Expecting ',' or ']'", held, at)
            value, at = DECODER.raw_decode(held, start.end())
        except json.JSONDecodeError:
            rest = held[at:]  # read twice as much each time: a long value is decoded few times
            if len(rest) > LONGEST_ROW:
                raise BrokenRowError(f"broken, or longer than {LONGEST_ROW} characters") from None
            if not (more := text.read(max(_CHUNK, len(rest)))):
                raise
            held, at = rest + more, 0
        else:
            refuse_halves(value, held, start.start(), at)
            lead = _COMMA
            yield value
    rest = held[end.end() :].lstrip()
    while not rest and (more := text.read(_CHUNK)):
        rest = more.lstrip()
    if rest:
        raise json.JSONDecodeError(f"the list is followed by {rest[:40]!r}", rest, 0)
