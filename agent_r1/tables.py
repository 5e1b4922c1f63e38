"""Records as Parquet: an Arrow schema for each, whole-file writes, refusals by field name."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from agent_r1 import records
from agent_r1.files import bring_back, replacing

Record = TypeVar("Record")  # one of SCHEMAS

ROW_GROUP = 1 << 14  # rows that `row_writer` writes at a time
# How tables are written. Pages have checksums; statistics, which have none, would hide rows from a filter.
_WRITTEN: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True, "write_statistics": False}

# The Arrow type of a record's field, by its Python type.
_ARRAYS: dict[Any, pa.DataType] = {
    records.Int32s: pa.list_(pa.int32()),
    NDArray[np.uint8]: pa.list_(pa.uint8()),
    records.Floats32: pa.list_(pa.float32()),
    records.Mask: pa.list_(pa.bool_()),
}
_PLAIN: dict[Any, pa.DataType] = {
    **dict.fromkeys((str, records.StopReason, records.CallStatus, records.Outcome), pa.string()),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    list[str]: pa.list_(pa.string()),
    list[int]: pa.list_(pa.int32()),  # positions of tokens
    dict[str, float]: pa.map_(pa.string(), pa.float64()),
    dict[str, str]: pa.map_(pa.string(), pa.string()),
}


def _schema(kind: type, **special: pa.DataType) -> pa.Schema:
    types = {name: special.get(name) or (_ARRAYS | _PLAIN)[hint] for name, hint in get_type_hints(kind).items()}
    return pa.schema([pa.field(name, stored, nullable=False) for name, stored in types.items()])


_CALLS = pa.list_(pa.struct(list(_schema(records.Call))))
STEP_TYPE = pa.struct(list(_schema(records.Step, action_start=pa.int32(), action_stop=pa.int32(), calls=_CALLS)))
_LATER = (
    "state",
    "duration_s",
)  # fields of steps in the order in which they came; earlier files lack the last, or both
_EARLIER = [
    pa.list_(pa.struct([field for field in STEP_TYPE if field.name not in _LATER[n:]])) for n in range(len(_LATER))
]
_FLAT = (records.Question, records.Passage, records.Proof, records.Credit, records.Prediction)
SCHEMAS: dict[type, pa.Schema] = {
    **{kind: _schema(kind) for kind in _FLAT},
    records.Trajectory: _schema(records.Trajectory, steps=pa.list_(STEP_TYPE)),
}


def write_rows(path: Path, rows: Sequence[Record], kind: type[Record]) -> None:
    """Writes the rows as one Parquet file, or raises OSError (a full disk) and leaves an older one untouched."""
    table = _table(rows, kind)
    with replacing(path) as temporary:
        pq.write_table(table, temporary, **_WRITTEN)


@contextmanager
def row_writer(path: Path, kind: type[Record], part: int = ROW_GROUP) -> Iterator[Callable[[Record], None]]:
    """Gives a function that adds a row to one Parquet file, so many at a time; the file is whole or not there."""
    with replacing(path) as temporary, pq.ParquetWriter(temporary, SCHEMAS[kind], **_WRITTEN) as file:
        waiting = list[Record]()

        def flush() -> None:
            file.write_table(_table(waiting, kind))
            waiting.clear()

        def add(row: Record) -> None:
            waiting.append(row)
            if len(waiting) == part:
                flush()

        yield add
        if waiting:
            flush()


def read_rows(path: Path, kind: type[Record], where: pc.Expression | None = None) -> list[Record]:
    """Reads the rows of one Parquet file: all of them, or only the rows for which `where` holds.

    What an earlier version did not write has the record's default. Raises FileNotFoundError if there is no such file,
    and ValueError if it is not as it was written, or if a field, which is named, is not the record's.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; run the stage that writes it (`dvc repro` knows which)")
    with whole(path):
        table = pq.read_table(path, filters=where, page_checksum_verification=True)
        _require_apart(pq.read_metadata(path))
        check_schema(path, table.schema, _schema_of(kind, table.schema))
    try:
        return _rows(table, kind)
    except ValueError as fault:
        raise ValueError(f"{path} holds a row that cannot be: {fault}") from fault


def to_line(row: Record, kind: type[Record]) -> str:
    """A row as one line of JSON."""
    return json.dumps(_table([row], kind).to_pylist()[0])


def from_line(line: str, kind: type[Record]) -> Record:
    """The row of a line of JSON."""
    values = json.loads(line)
    hints = get_type_hints(kind)
    for field in SCHEMAS[kind]:
        if hints[field.name] in _ARRAYS:
            values[field.name] = np.array(values[field.name], field.type.value_type.to_pandas_dtype())
    row: Record = _builder(kind)(values)
    return row


def _rows(table: pa.Table, kind: type[Record]) -> list[Record]:
    build = _builder(kind)
    hints = get_type_hints(kind)
    columns = {name: _column(table.column(name), is_array=hints[name] in _ARRAYS) for name in table.column_names}
    return [build({name: column[i] for name, column in columns.items()}) for i in range(table.num_rows)]


@contextmanager
def open_rows(path: Path) -> Iterator[pq.ParquetFile]:
    """One Parquet file, read in parts, none ahead. Raises ValueError, at its end at the latest, if it has changed."""
    with whole(path), pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
        yield file
        _require_apart(file.metadata)


def _require_apart(metadata: pq.FileMetaData) -> None:
    """Refuses a footer by which two columns share bytes: it has no checksum, and one would be read as the other.

    Read the file first: a footer that its reader refuses can end the process here, within pyarrow.
    """
    stop = 0
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            pages = (column.dictionary_page_offset, column.data_page_offset)  # None or 0 for one that is not there
            start = min(filter(None, pages), default=stop)
            if start < stop:
                raise pa.ArrowInvalid(f"column {column.path_in_schema} begins within another")
            stop = start + column.total_compressed_size


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """Refuses a file that Parquet cannot read, or whose checksums say that it has changed."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as fault:
        raise ValueError(f"{path} is damaged ({fault}); {bring_back(path)}") from fault


def _table(rows: Sequence[Record], kind: type[Record]) -> pa.Table:
    schema = SCHEMAS[kind]
    columns = [pa.array([_plain(getattr(row, field.name)) for row in rows], type=field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _schema_of(kind: type[Record], stored: pa.Schema) -> pa.Schema:
    """A record's schema without what earlier files lack: columns that have a default, and fields of steps."""
    fields = dict(zip(SCHEMAS[kind].names, SCHEMAS[kind], strict=True))
    for field in dataclasses.fields(cast(Any, kind)):
        if field.name not in stored.names and field.default is not dataclasses.MISSING:
            del fields[field.name]
    if kind is records.Trajectory and "steps" in stored.names and stored.field("steps").type in _EARLIER:
        fields["steps"] = fields["steps"].with_type(stored.field("steps").type)
    return pa.schema(fields.values())


def check_schema(path: Path, schema: pa.Schema, expected: pa.Schema) -> None:
    """Refuses a file with a ValueError that names the first field which is missing, unknown or of another type."""
    remedy = "delete the file and rerun its stage"
    for field in expected:
        if field.name not in schema.names:
            raise ValueError(f"{path}: field {field.name!r} is missing; {remedy}")
        kind = schema.field(field.name).type
        if kind != field.type:
            raise ValueError(f"{path}: field {field.name!r} is {kind}, expected {field.type}; {remedy}")
    for name in schema.names:
        if name not in expected.names:
            raise ValueError(f"{path}: field {name!r} is unknown; {remedy}")


def _plain(value: Any) -> Any:
    """A value as Arrow takes it: steps become dictionaries, and dictionaries pairs."""
    if isinstance(value, list) and value and isinstance(value[0], records.Step):
        return [{**dataclasses.asdict(step), "rewards": list(step.rewards.items())} for step in value]
    return list(value.items()) if isinstance(value, dict) else value


def _column(column: pa.ChunkedArray[Any], *, is_array: bool) -> list[Any]:
    if not is_array:
        return column.to_pylist()
    values = pc.list_flatten(column).to_numpy().astype(column.type.value_type.to_pandas_dtype(), copy=False)
    lengths = pc.list_value_length(column).to_numpy()
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _builder(hint: Any) -> Callable[[Any], Any]:
    """The function that makes a value of a type from Arrow's: a record, a list of them, a dictionary or an enum."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        parts = {name: _builder(part) for name, part in get_type_hints(hint).items()}
        return lambda fields: hint(**{name: build(fields[name]) for name, build in parts.items() if name in fields})
    if get_origin(hint) is list and dataclasses.is_dataclass(get_args(hint)[0]):
        build = _builder(get_args(hint)[0])
        return lambda rows: [build(row) for row in rows]
    if get_origin(hint) is dict:
        return dict
    return hint if isinstance(hint, type) and issubclass(hint, enum.Enum) else lambda value: value
