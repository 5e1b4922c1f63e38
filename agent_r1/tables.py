"""Records as Parquet: explicit Arrow schemas, whole-file writes, refusals by field name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agent_r1.files import replacing
from agent_r1.records import (
    CallStatus,
    Credit,
    Outcome,
    Passage,
    Prediction,
    Proof,
    Question,
    Step,
    StopReason,
    Trajectory,
)

Row = TypeVar("Row", Question, Passage, Trajectory, Proof, Credit, Prediction)

ROW_GROUP = 1 << 14  # rows that `row_writer` writes at a time


def _schema(**fields: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields.items()])


_STRING, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()

STEP_TYPE = pa.struct(
    list(
        _schema(
            action_start=pa.int32(),
            action_stop=pa.int32(),
            stop_reason=_STRING,
            tool=_STRING,
            arguments=_STRING,
            call_status=_STRING,
            latency_s=_FLOAT,
            rewards=pa.map_(_STRING, _FLOAT),
        )
    )
)

SCHEMAS: dict[type, pa.Schema] = {
    Question: _schema(
        question_id=_STRING,
        dataset=_STRING,
        split=_STRING,
        text=_STRING,
        answers=pa.list_(_STRING),
        gold_titles=pa.list_(_STRING),
        hops=_INT,
        kind=_STRING,
    ),
    Passage: _schema(passage_id=_STRING, title=_STRING, text=_STRING),
    Trajectory: _schema(
        trajectory_id=_STRING,
        question_id=_STRING,
        group=_INT,
        sample=_INT,
        seed=_INT,
        policy_version=_INT,
        iteration=_INT,
        token_ids=pa.list_(pa.int32()),
        source=pa.list_(pa.uint8()),
        logprobs=pa.list_(pa.float32()),
        context_starts=pa.list_(pa.int32()),
        steps=pa.list_(STEP_TYPE),
        outcome=_STRING,
        answer=_STRING,
    ),
    Proof: _schema(trajectory_id=_STRING, learner_logprobs=pa.list_(pa.float32())),
    Credit: _schema(
        trajectory_id=_STRING,
        return_=_FLOAT,
        advantages=pa.list_(pa.float32()),
        values=pa.list_(pa.float32()),
        value_targets=pa.list_(pa.float32()),
        reference_logprobs=pa.list_(pa.float32()),
        loss_mask=pa.list_(pa.bool_()),
        critic_mask=pa.list_(pa.bool_()),
        kept=pa.bool_(),
    ),
    Prediction: _schema(
        run=_STRING,
        seed=_INT,
        policy_version=_INT,
        question_id=_STRING,
        answer=_STRING,
        em=_FLOAT,
        f1=_FLOAT,
        contains=_FLOAT,
        steps=_INT,
        tool_calls=_INT,
        gold_titles_found=_INT,
        tokens_read=_INT,
        tokens_sampled=_INT,
    ),
}

_ARRAY_DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "source": np.uint8,
    "logprobs": np.float32,
    "learner_logprobs": np.float32,
    "advantages": np.float32,
    "values": np.float32,
    "value_targets": np.float32,
    "reference_logprobs": np.float32,
    "loss_mask": np.bool_,
    "critic_mask": np.bool_,
}


def write_rows(path: Path, rows: Sequence[Row], kind: type[Row]) -> None:
    """Writes the rows as one Parquet file, whole or not at all.

    Raises:
        OSError: the disk is full or not writable; an older file at `path` is untouched.
    """
    table = _table(rows, kind)
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


@contextmanager
def row_writer(path: Path, kind: type[Row]) -> Iterator[Callable[[Row], None]]:
    """Gives a function that takes the rows of one Parquet file one by one; the file is written whole or not at all.

    No more than a row group, ROW_GROUP rows, is held in memory.

    Raises:
        OSError: the disk is full or not writable; an older file at `path` is untouched.
    """
    with replacing(path) as temporary, pq.ParquetWriter(temporary, SCHEMAS[kind], compression="zstd") as file:
        waiting: list[Row] = []

        def flush() -> None:
            file.write_table(_table(waiting, kind))
            waiting.clear()

        def add(row: Row) -> None:
            waiting.append(row)
            if len(waiting) == ROW_GROUP:
                flush()

        yield add
        if waiting:
            flush()


def read_rows(path: Path, kind: type[Row], where: pc.Expression | None = None) -> list[Row]:
    """Reads the rows of one Parquet file: all of them, or those for which `where` holds.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file's schema is not the record's; the message names the field.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; run the stage that writes it (`dvc repro` knows which)")
    table = pq.read_table(path, filters=where)
    check_schema(path, table.schema, SCHEMAS[kind])
    build = _BUILDERS.get(kind, kind)
    columns = {name: _column(name, table.column(name)) for name in table.column_names}
    return [build(**{name: column[i] for name, column in columns.items()}) for i in range(table.num_rows)]


def _table(rows: Sequence[Row], kind: type[Row]) -> pa.Table:
    schema = SCHEMAS[kind]
    columns = [pa.array([_plain(getattr(row, field.name)) for row in rows], type=field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def check_schema(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    """Refuses a file with a ValueError that names the first field which is missing, unknown or of another type."""
    for field in expected:
        if field.name not in found.names:
            raise ValueError(f"{path}: field {field.name!r} is missing; delete the file and rerun its stage")
        if found.field(field.name).type != field.type:
            raise ValueError(
                f"{path}: field {field.name!r} is {found.field(field.name).type}, expected {field.type}; "
                "delete the file and rerun its stage"
            )
    for name in found.names:
        if name not in expected.names:
            raise ValueError(f"{path}: field {name!r} is unknown; delete the file and rerun its stage")


def _plain(value: Any) -> Any:
    """Arrow takes numpy arrays, numbers and strings as they are; steps become dictionaries."""
    if isinstance(value, list) and value and isinstance(value[0], Step):
        return [{**dataclasses.asdict(step), "rewards": list(step.rewards.items())} for step in value]
    return value


def _column(name: str, column: pa.ChunkedArray[Any]) -> list[Any]:
    if name not in _ARRAY_DTYPES:
        return column.to_pylist()
    values = pc.list_flatten(column).to_numpy().astype(_ARRAY_DTYPES[name], copy=False)
    lengths = pc.list_value_length(column).to_numpy()
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _trajectory(**fields: Any) -> Trajectory:
    steps = [
        Step(
            **{
                **step,
                "stop_reason": StopReason(step["stop_reason"]),
                "call_status": CallStatus(step["call_status"]),
                "rewards": dict(step["rewards"]),
            }
        )
        for step in fields.pop("steps")
    ]
    return Trajectory(**{**fields, "steps": steps, "outcome": Outcome(fields["outcome"])})


_BUILDERS: dict[type, Callable[..., Any]] = {Trajectory: _trajectory}
