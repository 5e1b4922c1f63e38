"""Reading data files row by row: a JSON list, JSON lines or Parquet, plain or gzipped, never a whole file in memory."""

from __future__ import annotations

import gzip
import json
import logging
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from agent_r1.data.rows import Row

logger = logging.getLogger(__name__)
T = TypeVar("T")

LINE_EVERY = 100_000  # items
ROWS = (".json", ".jsonl", ".parquet")  # with or without .gz behind
_CHUNK = 1 << 20  # characters
_LONGEST_ROW = 1 << 26  # characters; a row that does not end before is a broken one
_BATCH = 1024  # rows of a Parquet file
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

    Raises:
        FileNotFoundError: there is no such file or folder, or none that fits.
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
    """The rows of all files of a location, one after the other.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: a file or a row cannot be read; the message names both.
    """
    for path in data_files(location):
        yield from _read_file(path)


def count(location: Path) -> int:
    """How many rows `read` gives.

    Raises:
        FileNotFoundError, ValueError: as for `read`; besides, there is not a single row.
    """
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

    Raises:
        ValueError: it is not UTF-8, or not a whole gzip file.
    """
    open_binary = gzip.open if path.suffix == ".gz" else open
    try:
        with open_binary(path, "rb") as file, TextIOWrapper(file, encoding="utf-8-sig") as text:
            yield text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); download it again") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8 ({error}); download it again or convert it") from None


@contextmanager
def _open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole Parquet file ({error}); download it again") from None


def _read_file(path: Path) -> Iterator[Row]:
    number = 0
    try:
        for number, fields in enumerate(_values(path), start=1):
            if not isinstance(fields, dict):
                raise ValueError(f"{path}, row {number}: expected an object with named fields, found {fields!r:.80}")
            yield Row(fields, path, number)
    except (json.JSONDecodeError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ValueError(
            f"{path}, row {number + 1}: broken or cut off ({problem}); expected a JSON list of objects or one "
            "object per line; download the file again"
        ) from None


def _values(path: Path) -> Iterator[Any]:
    if suffix(path) == ".parquet":
        with _open_parquet(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                yield from batch.to_pylist()
        return
    with open_text(path) as text:
        is_list = text.read(_CHUNK).lstrip().startswith("[")
        text.seek(0)
        yield from _list_items(text) if is_list else (json.loads(line) for line in text if line.strip())


def _list_items(text: TextIO) -> Iterator[Any]:
    """The values of a JSON list, out of a window of its text that grows until the next value in it is whole."""
    decoder = json.JSONDecoder()
    held = text.read(_CHUNK)
    at, lead = held.index("[") + 1, _BLANK
    while not (end := _END.match(held, at)):
        try:
            start = lead.match(held, at)
            if not start:
                raise json.JSONDecodeError("Expecting ',' or ']'", held, at)
            value, at = decoder.raw_decode(held, start.end())
        except json.JSONDecodeError:
            rest = held[at:]  # read twice as much each time: a long value is decoded few times
            more = text.read(max(_CHUNK, len(rest))) if len(rest) <= _LONGEST_ROW else ""
            if not more:
                raise
            held, at = rest + more, 0
        else:
            lead = _COMMA
            yield value
    rest = held[end.end() :].lstrip()
    while not rest and (more := text.read(_CHUNK)):
        rest = more.lstrip()
    if rest:
        raise json.JSONDecodeError(f"the list is followed by {rest[:40]!r}", rest, 0)
