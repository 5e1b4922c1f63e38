"""Reading files row by row, whatever their form, and saying which file and row is broken."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.data import sources
from agent_r1.data.sources import Row, count, data_files, read
from tests.cases import cases

ROWS = [{"a": 1, "text": "x, [y] {z} \u00e9"}, {"a": 2, "text": ""}, {"a": 3, "text": '"quoted"\\'}]
LIST, LINES = json.dumps(ROWS), "\n".join(map(json.dumps, ROWS))


def fields(location: Path) -> list[dict[str, Any]]:
    return [row.fields for row in read(location)]


def written(path: Path, content: str) -> Path:
    data = content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.json", LIST),
        ("rows.json", LINES),  # the content counts, not the name
        ("rows.jsonl", f" \n{LIST}\n"),
        ("rows.json.gz", json.dumps(ROWS, indent=2)),
        ("rows.jsonl.gz", f"\n{LINES}\n\n"),
        ("rows.jsonl", f"\ufeff{LINES}"),
    ],
)
def test_lists_and_lines_are_the_same_rows(tmp_path: Path, name: str, content: str) -> None:
    path = written(tmp_path / name, content)
    assert fields(path) == ROWS
    assert [str(row) for row in read(path)] == [f"{path}, row {number}" for number in (1, 2, 3)]
    assert count(path) == 3


@cases("name, content, expected")
def test_text_in_a_table_stays_text(tmp_path: Path, name: str, content: str, expected: list[list[str | None]]) -> None:
    path = written(tmp_path / name, content)
    assert fields(path) == [{"a": a, "b": b} for a, b in expected]
    assert [row.number for row in read(path)] == [*range(1, len(expected) + 1)]


@cases("cell, texts")
def test_a_cell_holds_several_texts(tmp_path: Path, cell: str, texts: list[str] | None) -> None:
    row = Row({"titles": cell}, tmp_path / "x.csv.gz", 1)
    if texts:
        assert row.texts("titles") == texts
        return
    with pytest.raises(ValueError, match=r"must be a list of texts; in a table as JSON, or parted by \|, found"):
        row.texts("titles")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.dictionaries(st.text(), JSON)), st.integers(1, 40), st.sampled_from([None, 1]))
def test_a_list_is_read_whatever_the_size_of_the_pieces(rows: list[Any], chunk: int, indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_CHUNK", chunk)
        assert list(sources._list_items(io.StringIO(json.dumps(rows, indent=indent)))) == rows


def test_a_location_is_a_file_a_folder_or_a_pattern(tmp_path: Path) -> None:
    names = ["b/train-1.jsonl", "a/train-0.jsonl.gz", "a/notes.md", "train-2.parquet"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert data_files(tmp_path) == [tmp_path / name for name in ("a/train-0.jsonl.gz", "b/train-1.jsonl", names[3])]
    assert data_files(tmp_path / "a/notes.md") == [tmp_path / "a/notes.md"]  # named, so taken
    assert data_files(tmp_path / "b/train-*.jsonl") == [tmp_path / "b/train-1.jsonl"]


def test_hidden_copies_are_no_data(tmp_path: Path) -> None:
    folder = tmp_path / ".home/data"  # the folder itself may lie below such a name
    data = [folder / "a.jsonl", folder / "b/c.jsonl"]
    copies = [".ipynb_checkpoints/a-checkpoint.jsonl", "._a.jsonl", "b/.cache/deep/a.jsonl", "__MACOSX/._a.jsonl"]
    for path in (*data, *(folder / name for name in copies)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert data_files(folder) == data
    assert data_files(folder / "*.jsonl") == data[:1]
    assert data_files(folder / "._a.jsonl") == [folder / "._a.jsonl"]  # named, so taken
    with pytest.raises(FileNotFoundError, match=r"\(names that begin with a dot aside\); put the files there"):
        data_files(folder / "__MACOSX")


@cases("name, message")
@pytest.mark.parametrize("content", ["", "[]"])
def test_a_file_that_is_missing_or_empty_is_named(tmp_path: Path, name: str, message: str, content: str) -> None:
    if name == "x.json":
        (tmp_path / "x.json").write_text(content)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        count(tmp_path / name)


@cases("name, content, message")
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    cut = gzip.compress(LINES.encode() * 1000, mtime=0)[:-12]
    (tmp_path / name).write_bytes(cut if content == "cut" else content.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{name}(, |: ){message}"):
        fields(tmp_path / name)


def test_a_broken_row_does_not_make_the_whole_file_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_CHUNK", 10)
    monkeypatch.setattr(sources, "LONGEST_ROW", 100)
    text = io.StringIO('[{"a": oops}' + "x" * 10_000)
    with pytest.raises(ValueError, match="broken, or longer than 100 characters"):
        list(sources._list_items(text))
    assert text.tell() < 400


def test_what_is_small_on_disk_stays_small_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LONGEST_ROW", 1000)
    monkeypatch.setattr(sources, "_UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr(sources, "_DECODING", 32)
    nulls = pa.ListArray.from_arrays(pa.array([0, 1 << 25], pa.int32()), pa.nulls(1 << 25))
    tables = {
        "1: cannot be decoded in 32 MiB of memory, with those": pa.array(["x" * 100_000] * 1500).dictionary_encode(),
        "1: cannot be decoded in 32 MiB": nulls,
        "2: longer than 1000 bytes": pa.array(["x", "x" * 1001]),
        "3073: the file unpacks to more than 1 MiB": pa.array(["x" * 300] * 10_000),
        "2: a value cannot be read .'utf-8' codec": pa.array([b"good", b"\xff"]).view(pa.string()),
    }
    for message, column in tables.items():
        pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet", compression="zstd", store_schema=False)
        with pytest.raises(ValueError, match=rf"x\.parquet, row {message}"):
            list(read(tmp_path / "x.parquet"))


@cases("name, content, message")
def test_a_row_beyond_the_limits_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, message: str
) -> None:
    monkeypatch.setattr(sources, "LONGEST_ROW", 1000)
    monkeypatch.setattr(sources, "_UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr(sources, "_CHUNK", 1000)
    written(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        list(read(tmp_path / name))


@cases("content, message")
def test_a_field_that_no_row_has_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        [row.pairs("context", "x") for row in read(tmp_path / "x.jsonl")]
