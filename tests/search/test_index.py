"""Building and opening what params.yaml configures, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertModel

from agent_r1.params import SearchParams
from agent_r1.records import Passage, Question
from agent_r1.search import bm25
from agent_r1.search.base import SearchUnavailable
from agent_r1.search.index import build, describe, open_index, open_local
from agent_r1.tables import write_rows

KINDS = ["bm25", "dense", "hybrid"]


def of_kind(params: SearchParams, kind: str) -> SearchParams:
    return params.model_copy(update={"kind": kind})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_finds_whole_passages(
    kind: str, stored: Path, tmp_path: Path, passages: list[Passage], search_params: SearchParams
) -> None:
    params = of_kind(search_params, kind)
    build(params, stored, tmp_path / "index")
    index = open_index(params, stored, tmp_path / "index")
    [found] = index.search(["country"], 2)
    assert len(found) == (1 if kind == "bm25" else 2)
    assert all(each in passages for each in found)
    if kind == "bm25":
        assert found == [passages[2]]
    assert describe(tmp_path / "index").size == 5
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"passages.parquet", "index"} | ({".index.vectors"} if kind != "bm25" else set())


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_passages_give_the_same_hash(
    kind: str, stored: Path, tmp_path: Path, search_params: SearchParams
) -> None:
    for name in ("first", "second"):
        build(of_kind(search_params, kind), stored, tmp_path / name)
    assert describe(tmp_path / "first") == describe(tmp_path / "second")


def test_an_index_of_other_passages_is_refused(
    stored: Path, tmp_path: Path, passages: list[Passage], search_params: SearchParams
) -> None:
    build(search_params, stored, tmp_path / "index")
    write_rows(stored, passages[:4], Passage)
    with pytest.raises(ValueError, match=r"built from other passages \(\w{12}\) than .*passages\.parquet .*index"):
        open_index(search_params, stored, tmp_path / "index")


@pytest.mark.parametrize(
    ("built", "asked", "fits"),
    [
        ({}, {"bm25.k1": 0.9}, False),
        ({}, {"kind": "hybrid"}, False),
        ({}, {"dense.pooling": "cls", "hybrid.candidates": 7, "cache_entries": 0}, True),
        ({"kind": "hybrid"}, {"kind": "hybrid", "hybrid.candidates": 7}, False),
        ({"kind": "hybrid"}, {"kind": "hybrid", "remote.timeout_s": 1.0}, True),
        ({"kind": "dense"}, {"kind": "dense", "dense.query_prefix": ""}, False),
        ({"kind": "dense"}, {"kind": "dense", "bm25.b": 0.1}, True),
    ],
)
def test_other_settings_of_its_kind_are_refused(
    built: dict[str, object],
    asked: dict[str, object],
    fits: bool,
    stored: Path,
    tmp_path: Path,
    search_params: SearchParams,
) -> None:
    build(changed(search_params, built), stored, tmp_path / "index")
    if fits:
        open_index(changed(search_params, asked), stored, tmp_path / "index").search(["tesk"], 1)
        return
    with pytest.raises(ValueError, match=r"built with other settings than search: has now; run the index stage"):
        open_index(changed(search_params, asked), stored, tmp_path / "index")


def test_another_encoder_of_the_same_name_is_refused(
    stored: Path, tmp_path: Path, tiny_encoder: Path, search_params: SearchParams
) -> None:
    """Passages would keep the vectors of the old one, and queries have those of the new one."""
    encoder = shutil.copytree(tiny_encoder, tmp_path / "encoder")
    params = changed(search_params, {"kind": "hybrid", "dense.encoder": str(encoder)})
    build(params, stored, tmp_path / "index")
    before = describe(tmp_path / "index").index_hash
    model = BertModel.from_pretrained(encoder)
    torch.nn.init.ones_(model.embeddings.word_embeddings.weight)
    model.save_pretrained(encoder)
    refused = r"built with another encoder \(\w{12}\) than .*encoder is now \(\w{12}\); .*`dvc repro -f index`"
    with pytest.raises(ValueError, match=refused):
        open_index(params, stored, tmp_path / "index")
    with pytest.raises(ValueError, match=refused):
        open_local(tmp_path / "index")
    build(params, stored, tmp_path / "index")
    open_index(params, stored, tmp_path / "index")
    assert describe(tmp_path / "index").index_hash != before


def changed(params: SearchParams, changes: dict[str, object]) -> SearchParams:
    content = params.model_dump()
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (content[section] if section else content)[name] = value
    return SearchParams.model_validate(content)


def test_a_missing_index_and_missing_passages_are_named(
    stored: Path, tmp_path: Path, search_params: SearchParams
) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no index at .*; run the index stage"):
        open_index(search_params, stored, tmp_path / "index")
    with pytest.raises(FileNotFoundError, match=r"nothing\.parquet does not exist; run the prepare stage"):
        build(search_params, tmp_path / "nothing.parquet", tmp_path / "index")


def test_something_else_than_passages_is_refused(tmp_path: Path, search_params: SearchParams) -> None:
    write_rows(tmp_path / "questions.parquet", [], Question)
    with pytest.raises(ValueError, match=r"questions\.parquet: field 'passage_id' is missing"):
        build(search_params, tmp_path / "questions.parquet", tmp_path / "index")


def test_a_failed_build_keeps_the_old_index(
    stored: Path, tmp_path: Path, search_params: SearchParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(search_params, stored, tmp_path / "index")
    before = describe(tmp_path / "index")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bm25, "_write_columns", full_disk)
    with pytest.raises(OSError, match="No space"):
        build(changed(search_params, {"bm25.k1": 0.9}), stored, tmp_path / "index")
    assert describe(tmp_path / "index") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "passages.parquet"]


def test_a_remote_index_needs_its_server(stored: Path, tmp_path: Path, search_params: SearchParams) -> None:
    params = changed(search_params, {"kind": "remote", "remote.url": "http://127.0.0.1:9", "remote.timeout_s": 5.0})
    with pytest.raises(SearchUnavailable, match=r"http://127\.0\.0\.1:9 does not answer"):
        build(params, stored, tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["passages.parquet"]


def test_what_is_served_elsewhere_is_not_served_from_here(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(
        '{"kind": "remote", "size": 1, "passages_hash": "a", "bm25": null, "dense": null, "hybrid": null,'
        ' "served_hash": "b"}'
    )
    with pytest.raises(ValueError, match="only names an index that another server serves"):
        open_local(tmp_path)


def test_bm25_needs_neither_faiss_nor_torch() -> None:
    code = "import sys, agent_r1.search.index; print(*sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"faiss", "torch", "transformers", "fastapi", "numba"}
