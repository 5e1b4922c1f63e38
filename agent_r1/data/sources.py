"""Data files row by row: JSON, JSON lines, Parquet or tables of text, plain or gzipped, never a whole file in memory.

A file that is small on disk stays small in memory: rows have a longest length, and a packed file unpacks to a multiple
of its size. Every fault names file, row, field and the expected value.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import logging
import math
import re
import reprlib
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from agent_r1.records import Json

logger = logging.getLogger(__name__)
T = TypeVar("T")

LONGEST_ROW = 1 << 23  # characters, or bytes in Parquet; also of a paragraph
LINE_EVERY = 100_000  # items
TABLES = {".csv": ",;\t", ".tsv": "\t"}  # text in columns; of the separators the one that the head has most of
ROWS = (".json", ".jsonl", ".parquet", *TABLES)  # with or without .gz behind
_LONGEST_NUMBER = 4300  # digits that Python reads
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a character beyond the first 65,536, as JSON may write it
_CHUNK = 1 << 20  # characters
_BATCH = 1024  # rows of a Parquet file that are read at once
_BATCH_BYTES = 1 << 26  # of these rows
_UNPACKED = 32  # times the size of a packed file, or _UNPACKED_BYTES where that is more
_UNPACKED_BYTES = 1 << 25
_DECODING = 8  # times the unpacked size: the memory for decoding
_OBJECT_BYTES = 16  # that a value takes besides its content
_BLANK = re.compile(r"\s*")
_COMMA = re.compile(r"\s*,\s*")
_END = re.compile(r"\s*\]")


class BrokenRowError(ValueError):
    """A row that cannot be taken; the message says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read."""

    fields: Json
    path: Path
    number: int  # in its file, from 1

    def __str__(self) -> str:
        return f"{self.path}, row {self.number}"

    def has(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self.fields.get(field) is not None

    def text(self, field: str, *, numbers: bool = False) -> str:
        """A text that is not empty, or where `numbers` are taken one of them as a text."""
        value = self.fields.get(field)
        value = _in_digits(value) if numbers else value
        if not isinstance(value, str) or not value.strip():
            raise self.fault(field, "must be a text that is not empty")
        return value

    def choice(self, field: str, valid: Sequence[str]) -> str:
        """One of the valid texts."""
        value = self.text(field)
        if value not in valid:
            raise self.fault(field, f"must be one of {', '.join(valid)}")
        return value

    def texts(self, field: str) -> list[str]:
        """Texts, or numbers as such; empty ones and repetitions are left out; none where there is no such field.

        A cell of a table holds them as a JSON list, or parted by `|`.
        """
        value = self.fields.get(field)
        if isinstance(value, str) and suffix(self.path) in TABLES:
            value = _parts(value)
        match value:
            case None:
                return []
            case [*values] if all(isinstance(value, str) for value in map(_in_digits, values)):
                return list(dict.fromkeys(value for value in map(_in_digits, values) if value.strip()))
        raise self.fault(field, "must be a list of texts; in a table as JSON, or parted by |")

    def first(self, *fields: str) -> str:
        """The name of the first of these fields that the row has, or of the first of all."""
        return next((field for field in fields if self.has(field)), fields[0])

    def objects(self, field: str) -> list[Json]:
        """Mappings, at least one."""
        match self.fields.get(field):
            case [_, *_] as values if all(isinstance(value, dict) for value in values):
                return list(values)
        raise self.fault(field, "must be a list of objects that is not empty")

    def pairs(self, field: str, second: str) -> list[tuple[str, Any]]:
        """A title and something else, at least once.

        The releases hold [title, something] lists; Parquet files on the Hub hold {title: [...], `second`: [...]}, or
        objects of title and `second`, or the release's lists as JSON in a text.
        """
        value = self.fields.get(field)
        with contextlib.suppress(ValueError, RecursionError):
            value = _decode(value) if isinstance(value, str) else value
        pairs = _pairs(value, second)
        if not pairs or not all(isinstance(title, str) for title, _ in pairs):
            raise self.fault(field, f"must hold [title, {second}] pairs")
        return pairs

    def fault(self, field: str, expected: str) -> ValueError:
        """The exception for a malformed field."""
        content = reprlib.repr(self.fields[field])[:80] if field in self.fields else "no such field"
        return ValueError(f"{self}: field {field!r} {expected}, found {content}")


def _parts(cell: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        if cell.startswith("["):
            return _decode(cell)
    return cell if cell.startswith("['") else [part.strip() for part in cell.split("|")]


def _in_digits(value: Any) -> Any:
    """A number as a text, whole ones without a decimal point, as pandas adds it beside missing ones; or the value."""
    if type(value) in (int, float, Decimal) and -math.inf < value < math.inf:
        return str(value if value % 1 else int(value))
    return value


def _pairs(value: Any, second: str) -> list[tuple[Any, Any]]:
    match value:
        case {"title": [*titles]} if isinstance(value.get(second), list) and len(value[second]) == len(titles):
            return list(zip(titles, value[second], strict=True))
        case [*items] if all(isinstance(item, list) and len(item) == 2 for item in items):
            return [(title, content) for title, content in items]
        case [*items] if all(isinstance(item, dict) and second in item for item in items):
            return [(item.get("title"), item[second]) for item in items]
    return []


def _whole_number(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise BrokenRowError(f"a number has {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole_number)


def _decode(line: str) -> Any:
    value = _DECODER.decode(_short(line))
    _refuse_halves(value, line, 0, len(line))
    return value


def _short(line: str) -> str:
    if len(line) >= LONGEST_ROW:
        raise BrokenRowError(f"longer than {LONGEST_ROW} characters")
    return line


def _refuse_halves(value: Any, text: str, start: int, stop: int) -> None:
    """Raises BrokenRowError if UTF-8 cannot write a value of this part of a JSON text."""
    if not _HALF.search(text, start, stop):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BrokenRowError(f"holds half of a character ({error.object[error.start]!a})") from None


def progress(items: Iterable[T], name: str, total: int | None = None) -> Iterator[T]:
    """Passes items on: under a bar on a terminal, elsewhere with a log line every LINE_EVERY items."""
    bar = tqdm(items, desc=name, total=total, unit=" rows", disable=None, leave=False)
    for number, item in enumerate(bar, start=1):
        yield item
        if bar.disable and number % LINE_EVERY == 0:
            logger.info("%s: %d%s", name, number, f" of {total}" if total else "")


def data_files(
    location: Path, suffixes: tuple[str, ...] = ROWS, remedy: str = "correct prepare.files in params.yaml"
) -> list[Path]:
    """The files at a path, below a folder, or of a pattern such as train-*.parquet; FileNotFoundError for none.

    A folder and a pattern leave out every name that begins with a dot, and all below it: copies that notebooks, editors
    and macOS keep.
    """
    if location.is_dir():
        paths = [path for path in location.rglob("*") if path.is_file() and suffix(path) in suffixes]
        paths = [path for path in paths if not _hidden(path, location)]
    elif location.exists():
        paths = [location]
    else:
        paths = [path for path in location.parent.glob(location.name) if not _hidden(path, location.parent)]
    if not paths:
        problem = (
            f"holds no {', '.join(suffixes)} file (names that begin with a dot aside)"
            if location.is_dir()
            else "does not exist"
        )
        raise FileNotFoundError(f"{location} {problem}; put the files there or {remedy}")
    return sorted(paths)


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def suffix(path: Path) -> str:
    """The last suffix before .gz."""
    return Path(path.name.removesuffix(".gz")).suffix


def read(location: Path) -> Iterator[Row]:
    """The rows of all files of a location, one after the other."""
    for path in data_files(location):
        yield from _read_file(path)


def count(location: Path) -> int:
    """How many rows `read` gives. Raises the errors of `read`, and ValueError if there is not a single row."""
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
    """A file as text, unzipped if its name ends in .gz. A ValueError refuses non-UTF-8, and broken or huge gzip."""
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
        with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole Parquet file ({error}); download it again") from None


def _read_file(path: Path) -> Iterator[Row]:
    number = 0
    try:
        for number, fields in enumerate(_values(path), start=1):
            if not isinstance(fields, dict):
                content = reprlib.repr(fields)
                raise ValueError(f"{path}, row {number}: expected an object with named fields, found {content}")
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
        if separators := TABLES.get(suffix(path)):
            yield from _table_rows(text, separators)
            return
        begin = text.read(_CHUNK)
        text.seek(0)
        is_list = begin.lstrip().startswith("[")
        if begin.partition("\n")[0].strip() == "{":  # an object over several lines, which is alone
            yield _decode(text.read(LONGEST_ROW))
            return
        yield from _list_items(text) if is_list else (_decode(line) for line in pieces(text) if line.strip())


def _table_rows(text: TextIO, separators: str) -> Iterator[dict[str, str | None]]:
    """The rows of a table under the names of its head: every cell is text, an empty one null, an empty row none.

    A column without a name, as pandas writes its index, is passed over.
    """
    csv.field_size_limit(LONGEST_ROW)
    head = text.readline(LONGEST_ROW)
    text.seek(0)
    separator = max(separators, key=head.count)
    rows = csv.reader(map(_short, pieces(text)), delimiter=separator, strict=True, skipinitialspace=True)
    try:
        names = [name.strip() for name in next(rows, [])]
        if any(name and names.count(name) > 1 for name in names):
            raise BrokenRowError("the head has two columns of one name; give one of them another")
        for cells in rows:
            if not any(map(str.strip, cells)):
                continue
            if len(cells) != len(names):
                raise BrokenRowError(
                    f"{len(cells)} cells under a head of {len(names)}; a text with a separator or a line break is "
                    'between quotation marks, with "" for each mark within'
                )
            yield {name: cell if cell.strip() else None for name, cell in zip(names, cells, strict=True) if name}
    except csv.Error as error:
        raise BrokenRowError(
            f'{error}; a text that begins with a quotation mark ends with one, and has "" for each mark within'
        ) from None


def _parquet_rows(path: Path) -> Iterator[Any]:
    room = _room(path)
    unpacked = 0
    with _open_parquet(path) as file:
        rows = _batch_size(file.metadata)
        _try(path, _DECODING * room >> 20, rows)
        for batch in file.iter_batches(rows, use_threads=False):
            weight = sum(map(_weight, batch.columns))
            unpacked += weight
            if unpacked > room:
                raise BrokenRowError(f"the file unpacks to more than {room >> 20} MiB; write it as JSON lines instead")
            yield from _fields(batch, weight)


def _try(path: Path, mebibytes: int, rows: int) -> None:
    """Raises ValueError if the rows of a file, `rows` at a time, cannot be decoded in `mebibytes` of memory."""
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
    """Rows that come to _BATCH_BYTES by the file's own figures."""
    size = sum(metadata.row_group(at).total_byte_size for at in range(metadata.num_row_groups))
    return max(1, min(_BATCH, _BATCH_BYTES * metadata.num_rows // max(1, size)))


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
    window = text.read(_CHUNK)
    at = window.index("[") + 1
    lead = _BLANK
    while not (end := _END.match(window, at)):
        try:
            start = lead.match(window, at)
            if not start:
                raise json.JSONDecodeError("Expecting ',' or ']'", window, at)
            value, at = _DECODER.raw_decode(window, start.end())
        except json.JSONDecodeError:
            rest = window[at:]  # read twice as much each time: a long value is decoded few times
            if len(rest) > LONGEST_ROW:
                raise BrokenRowError(f"broken, or longer than {LONGEST_ROW} characters") from None
            chunk = text.read(max(_CHUNK, len(rest)))
            if not chunk:
                raise
            window = rest + chunk
            at = 0
        else:
            _refuse_halves(value, window, start.start(), at)
            lead = _COMMA
            yield value
    rest = window[end.end() :].lstrip()
    while not rest:
        chunk = text.read(_CHUNK)
        if not chunk:
            return
        rest = chunk.lstrip()
    raise json.JSONDecodeError(f"the list is followed by {rest[:40]!r}", rest, 0)
