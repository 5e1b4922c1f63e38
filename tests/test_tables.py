"""Parquet tables: every record comes back as it was, wrong files are refused, a full disk loses nothing."""

import dataclasses
import errno
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.records import (
    Call,
    CallStatus,
    Credit,
    Outcome,
    Passage,
    Prediction,
    Proof,
    Question,
    Source,
    Step,
    StopReason,
    Trajectory,
)
from agent_r1.tables import (
    ROW_GROUP,
    SCHEMAS,
    STEP_TYPE,
    from_line,
    open_rows,
    read_rows,
    row_writer,
    to_line,
    write_rows,
)
from tests.trajectories import from_parts

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # surrogates are not text
FILLED = TEXT.filter(str.strip)
COUNT = st.integers(0, 2**63 - 1)
NUMBER = st.floats(allow_nan=False)
PLAIN = {"str": TEXT, "int": COUNT, "float": NUMBER, "bool": st.booleans()}
ARRAYS: dict[str, tuple[type[np.generic], st.SearchStrategy[Any]]] = {
    "token_ids": (np.int32, st.integers(0, 2**31 - 1)),
    "source": (np.uint8, st.integers(0, 3)),
    **dict.fromkeys(("loss_mask", "critic_mask"), (np.bool_, st.booleans())),
    **dict.fromkeys(
        ("logprobs", "learner_logprobs", "advantages", "values", "value_targets", "reference_logprobs"),
        (np.float32, st.floats(-100, 100, width=32)),
    ),
}

STEP = {"calls": [Call(tool="search", status=CallStatus.OK)], "rewards": {"em": 1.0, "f1": 0.5}}
TRAJECTORY = from_parts([(Source.PROMPT, [0]), (Source.ACTION, [1, 2])], [STEP], answer="a")
PASSAGES = [Passage(passage_id=str(i), title=f"title {i}", text="a <|im_end|> b") for i in range(3)]


def array(dtype: type[np.generic], elements: st.SearchStrategy[Any], length: int) -> st.SearchStrategy[Any]:
    values = st.lists(elements, min_size=length, max_size=length)
    return values.map(lambda drawn: np.array(drawn, dtype=dtype))


def record(kind: type[Any], length: int = 0, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A record with all fields drawn by their types, arrays of a length, and what is special about some."""
    fields = dataclasses.fields(kind)
    plain = {field.name: PLAIN[str(field.type)] for field in fields if field.type in PLAIN}
    arrays = {field.name: array(*ARRAYS[field.name], length) for field in fields if field.name in ARRAYS}
    return st.builds(kind, **{**plain, **arrays, **special})


def steps(length: int) -> st.SearchStrategy[list[Step]]:
    spans = st.tuples(st.integers(0, length - 1), st.integers(1, length)).filter(lambda span: span[0] < span[1])
    rest = {
        "stop_reason": st.sampled_from(StopReason),
        "calls": st.lists(record(Call, status=st.sampled_from(CallStatus)), max_size=2),
        "rewards": st.dictionaries(TEXT, NUMBER, max_size=3),
    }
    of_span = spans.flatmap(
        lambda span: record(Step, action_start=st.just(span[0]), action_stop=st.just(span[1]), **rest)
    )
    return st.lists(of_span, max_size=3)


def trajectories(length: int) -> st.SearchStrategy[Trajectory]:
    return record(
        Trajectory,
        length,
        context_starts=st.just([0]),
        steps=steps(length) if length else st.just([]),
        outcome=st.sampled_from(Outcome),
    )


LENGTH = st.integers(0, 6)
NAMES = {"answers": st.lists(FILLED, min_size=1, max_size=3), "gold_titles": st.lists(TEXT, max_size=3)}
RECORDS: dict[type, st.SearchStrategy[Any]] = {
    Question: record(Question, text=FILLED, **NAMES),
    Passage: record(Passage),
    Trajectory: LENGTH.flatmap(trajectories),
    Proof: LENGTH.flatmap(lambda length: record(Proof, length)),
    Credit: LENGTH.flatmap(lambda length: record(Credit, length)),
    Prediction: record(Prediction),
}


def assert_same(found: Any, expected: Any) -> None:
    """Field by field, with types: an array keeps its dtype, an enum of a step or an outcome stays one."""
    for field in dataclasses.fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype, field.name
            np.testing.assert_array_equal(one, other)
        else:
            assert repr(one) == repr(other), field.name
            if field.name == "steps" and isinstance(other, list):
                assert [step.duration_s for step in one] == [step.duration_s for step in other]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_records_come_back_alike(kind: type, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = data.draw(st.lists(RECORDS[kind], max_size=4))
    path = tmp_path_factory.getbasetemp() / f"{kind.__name__}.parquet"
    write_rows(path, rows, kind)
    found = read_rows(path, kind)
    assert len(found) == len(rows)
    for one, other in zip(found, rows, strict=True):
        assert_same(one, other)


def rewrite(path: Path, change: Any) -> None:
    pq.write_table(change(pq.read_table(path)), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["title"]), "field 'title' is missing"),
        (lambda table: table.append_column("score", pa.array([1, 2, 3])), "field 'score' is unknown"),
        (lambda table: table.set_column(1, "title", pa.array([1, 2, 3])), "field 'title' is int64, expected string"),
    ],
)
def test_another_schema_is_refused_by_the_field(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "passages.parquet"
    write_rows(path, PASSAGES, Passage)
    rewrite(path, change)
    with pytest.raises(ValueError, match=f"passages.parquet: {message}"):
        read_rows(path, Passage)


@pytest.mark.parametrize("lacking", [{"duration_s"}, {"duration_s", "state"}])
def test_steps_of_an_earlier_version_have_defaults(tmp_path: Path, lacking: set[str]) -> None:
    path = tmp_path / "trajectories.parquet"
    rows = [TRAJECTORY, dataclasses.replace(TRAJECTORY, trajectory_id="empty", steps=[])]
    write_rows(path, rows, Trajectory)

    def as_earlier(table: pa.Table) -> pa.Table:
        rows, at = table.column("steps").to_pylist(), table.schema.get_field_index("steps")
        kind = pa.list_(pa.struct([field for field in STEP_TYPE if field.name not in lacking]))
        return table.set_column(at, pa.field("steps", kind, nullable=False), pa.array(rows, kind))

    rewrite(path, as_earlier)
    assert not any(name in str(pq.read_schema(path)) for name in lacking)
    for one, other in zip(read_rows(path, Trajectory), rows, strict=True):
        assert_same(one, other)


def test_a_line_of_an_earlier_version_has_defaults() -> None:
    fields = json.loads(to_line(TRAJECTORY, Trajectory))
    for step in fields["steps"]:
        del step["duration_s"]
    assert_same(from_line(json.dumps(fields), Trajectory), TRAJECTORY)


@pytest.mark.parametrize("where", [None, pc.field("title").isin(["title 2", "title 0"])])
def test_a_file_with_a_flipped_bit_is_refused_or_read_as_it_was(tmp_path: Path, where: pc.Expression | None) -> None:
    path = tmp_path / "passages.parquet"
    write_rows(path, PASSAGES, Passage)
    expected, written, refused = read_rows(path, Passage, where), path.read_bytes(), list[str]()
    for bit in random.Random(0).sample(range(8 * len(written)), 300):
        flipped = bytearray(written)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert read_rows(path, Passage, where) == expected, bit
        except ValueError as fault:
            refused.append(str(fault))
    assert len(refused) > 150
    assert all(message.startswith(str(path)) for message in refused)


def test_column_with_the_pages_of_another_is_refused(tmp_path: Path) -> None:
    """The footer, which has no checksum, says of the texts that they lie where the titles do."""
    path = tmp_path / "passages.parquet"
    rows = [Passage(passage_id=f"passage {n}", title=f"title {n}", text=f"texts {n}") for n in range(3)]
    write_rows(path, rows, Passage)
    content = path.read_bytes()
    titles, texts = map(pq.read_metadata(path).row_group(0).column, (1, 2))
    for name in ("dictionary_page_offset", "data_page_offset"):
        other, own = (bytes([getattr(at, name) * 2 & 127 | 128, getattr(at, name) >> 6]) for at in (titles, texts))
        place = content.rindex(own)
        content = content[:place] + other + content[place + 2 :]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged \(column text begins within another"):
        read_rows(path, Passage)
    with pytest.raises(ValueError, match=r"is damaged \(column text begins within another"), open_rows(path) as file:
        file.read()


def test_a_file_without_checksums_is_read_as_ever_and_a_missing_one_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "new.parquet", PASSAGES, Passage)
    pq.write_table(pq.read_table(tmp_path / "new.parquet"), tmp_path / "old.parquet", compression="zstd")
    assert read_rows(tmp_path / "old.parquet", Passage) == PASSAGES
    with pytest.raises(FileNotFoundError, match=r"nowhere\.parquet does not exist"):
        read_rows(tmp_path / "nowhere.parquet", Passage)


def fill_the_disk(table: pa.Table, path: Path, **_: Any) -> None:
    """Half a file, then no space: what a full disk does."""
    Path(path).write_bytes(b"PAR1 half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_keeps_the_old_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "passages.parquet"
    write_rows(path, PASSAGES, Passage)
    monkeypatch.setattr("pyarrow.parquet.write_table", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        write_rows(path, PASSAGES[:1], Passage)
    assert read_rows(path, Passage) == PASSAGES
    assert [file.name for file in tmp_path.iterdir()] == ["passages.parquet"]


def test_many_rows_come_in_groups_and_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "many.parquet"
    with row_writer(path, Passage) as add:
        for number in range(2 * ROW_GROUP + 1):
            add(Passage(passage_id=str(number), title="", text=""))
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [ROW_GROUP, ROW_GROUP, 1]
    assert [row.passage_id for row in read_rows(path, Passage)] == [str(number) for number in range(2 * ROW_GROUP + 1)]


def test_files_are_stored_as_they_always_were() -> None:
    """A change to a record's types is a change to the format of files that people have."""
    found: dict[str, list[str]] = {}
    for kind, schema in SCHEMAS.items():
        for field in schema:
            assert not field.nullable
            found.setdefault(str(field.type), []).append(f"{kind.__name__}.{field.name}")
    stored = yaml.safe_load(Path(__file__).with_name("stored_types.yaml").read_text())
    assert found == {kind: names.split() for kind, names in stored.items()}
