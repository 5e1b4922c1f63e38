"""Building and opening the configured index, refusals, the memory of searches and fused rankings."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertModel

from agent_r1.faults import WorldFault
from agent_r1.files import SUMS
from agent_r1.params.search import BM25Params, HybridParams, SearchParams
from agent_r1.records import Passage, Question
from agent_r1.search import bm25
from agent_r1.search.base import Positions, Ranker, Search
from agent_r1.search.dense import Encoder
from agent_r1.search.index import Cached, Hybrid, build, describe, fuse, open_index, open_local
from agent_r1.tables import write_rows
from tests.cases import cases


@pytest.mark.parametrize("kind", ["bm25", "dense", "hybrid"])
def test_every_kind_finds_whole_passages_and_has_one_hash(
    kind: str, stored: Path, tmp_path: Path, passages: list[Passage], search_params: SearchParams
) -> None:
    params = search_params.model_copy(update={"kind": kind})
    build(params, stored, tmp_path / "index")
    index = open_index(params, stored, tmp_path / "index")
    [found] = index.search(["country"], 2)
    assert len(found) == (1 if kind == "bm25" else 2)
    assert all(each in passages for each in found)
    if kind == "bm25":
        assert found == [passages[2]]
    assert describe(tmp_path / "index").size == 5
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"passages.parquet", "index"}, "the index itself holds the vectors"
    build(params, stored, tmp_path / "second")
    assert describe(tmp_path / "index") == describe(tmp_path / "second"), "the same passages give the same hash"


@cases("kind, asked, fits")
def test_other_settings_of_its_kind_are_refused(
    kind: str, asked: dict[str, object], fits: bool, stored: Path, tmp_path: Path, search_params: SearchParams
) -> None:
    built = changed(search_params, {"kind": kind})
    build(built, stored, tmp_path / "index")
    if fits:
        open_index(changed(built, asked), stored, tmp_path / "index").search(["tesk"], 1)
        return
    with pytest.raises(ValueError, match=r"built with other settings than search: has now; run the index stage"):
        open_index(changed(built, asked), stored, tmp_path / "index")


def test_vectors_are_kept_once_and_another_kind_takes_them_over(
    stored: Path, tmp_path: Path, search_params: SearchParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flat index holds them; one that rounds them has them beside it."""
    flat = changed(search_params, {"kind": "dense"})
    rounded = changed(flat, {"dense.faiss": "sq8"})
    build(rounded, stored, tmp_path / "fresh")
    assert len(list((tmp_path / ".fresh.vectors").rglob("*.npy"))) == 1
    build(flat, stored, tmp_path / "index")
    monkeypatch.setattr(Encoder, "passages", lambda *_: pytest.fail("encoded again"))
    for params, kept in ((rounded, True), (flat, False), (rounded, True)):
        build(params, stored, tmp_path / "index")
        assert (tmp_path / ".index.vectors").exists() == kept
    assert describe(tmp_path / "index").index_hash == describe(tmp_path / "fresh").index_hash
    (tmp_path / "index" / "dense" / "faiss.index").write_bytes(b"")  # damaged: the vectors beside it serve
    build(flat, stored, tmp_path / "index")


def test_an_index_of_another_rule_of_words_is_refused(tmp_path: Path, search_params: SearchParams) -> None:
    def built(*titles: str) -> tuple[Path, Path]:
        stored, folder = tmp_path / f"{titles[0]}.parquet", tmp_path / titles[0]
        write_rows(stored, [Passage(passage_id=each, title=each, text="café") for each in titles], Passage)
        build(search_params, stored, folder)
        return stored, folder / "bm25" / bm25.RULE

    plain, rule = built("Kiss", "Ёлка")
    assert not rule.exists(), "where no script is cut otherwise, the files are those of the first rule"
    open_index(search_params, plain, rule.parents[1])
    for titles in (("Kiss", "富士山"), ("ไทย",), ("हिन्दी",)):
        stored, rule = built(*titles)
        open_index(search_params, stored, rule.parents[1])
        (rule.parents[1] / SUMS).unlink()  # as of an earlier version
        rule.rename(rule.with_name("words-3"))
        with pytest.raises(ValueError, match=r"by another rule than queries .*; run the index stage anew"):
            open_index(search_params, stored, rule.parents[1])
        rule.with_name("words-3").unlink()  # as before there were rules
        with pytest.raises(ValueError, match="by another rule"):
            open_local(rule.parents[1])


def test_an_index_that_kept_scores_is_refused_and_one_built_in_its_place_keeps_its_hash(
    stored: Path, tmp_path: Path, search_params: SearchParams
) -> None:
    folder = tmp_path / "index"
    build(search_params, stored, folder)
    own_hash = describe(folder).index_hash
    (folder / SUMS).unlink()
    (folder / "bm25" / bm25.COUNTS).rename(folder / "bm25/scores.npy")
    earlier_hash = describe(folder).index_hash
    with pytest.raises(ValueError, match=r"is of an earlier version, which kept scores; run the index stage anew"):
        open_index(search_params, stored, folder)
    for _ in range(2):
        build(search_params, stored, folder)
        assert open_index(search_params, stored, folder).index_hash == earlier_hash != own_hash
    other = search_params.model_copy(update={"bm25": BM25Params(k1=2.0, b=0.5)})
    build(other, stored, folder)
    assert describe(folder).index_hash != earlier_hash
    build(search_params, stored, folder)
    assert describe(folder).index_hash == own_hash


def test_other_encoder_refused(stored: Path, tmp_path: Path, tiny_encoder: Path, search_params: SearchParams) -> None:
    """Passages would keep the vectors of the old one, and queries have those of the new one."""
    encoder = shutil.copytree(tiny_encoder, tmp_path / "encoder")
    params = changed(search_params, {"kind": "hybrid", "dense.encoder": str(encoder)})
    build(params, stored, tmp_path / "index")
    before = describe(tmp_path / "index").index_hash
    model = BertModel.from_pretrained(encoder)
    torch.nn.init.ones_(model.embeddings.word_embeddings.weight)
    model.save_pretrained(encoder)
    refused = r"built with another encoder \(\w{12}\) than .*encoder is now \(\w{12}\); .*`dvc repro --single-item"
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


def test_what_is_missing_or_of_another_kind_is_named(stored: Path, tmp_path: Path, search_params: SearchParams) -> None:
    folder = tmp_path / "index"
    with pytest.raises(FileNotFoundError, match=r"there is no index at .*; run the index stage"):
        open_index(search_params, stored, folder)
    with pytest.raises(FileNotFoundError, match=r"nothing\.parquet does not exist; run the prepare stage"):
        build(search_params, tmp_path / "nothing.parquet", folder)
    write_rows(tmp_path / "questions.parquet", [], Question)
    with pytest.raises(ValueError, match=r"questions\.parquet: field 'passage_id' is missing"):
        build(search_params, tmp_path / "questions.parquet", folder)
    params = changed(search_params, {"kind": "remote", "remote.url": "http://127.0.0.1:9", "remote.timeout_s": 5.0})
    with pytest.raises(WorldFault, match=r"http://127\.0\.0\.1:9 does not answer"):
        build(params, stored, folder)
    assert not folder.exists()
    build(search_params, stored, folder)
    write_rows(stored, [Passage(passage_id="0", title="Tesk", text="")], Passage)
    with pytest.raises(ValueError, match=r"built from other passages \(\w{12}\) than .*passages\.parquet .*index"):
        open_index(search_params, stored, folder)
    nothing = dict.fromkeys(("bm25", "dense", "hybrid"))
    known = {"kind": "remote", "size": 1, "passages_hash": "a", "served_hash": "b", **nothing}
    (folder / "meta.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match="only names an index that another server serves"):
        open_local(folder)


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
    assert sorted(path.name for path in tmp_path.iterdir()) == [".index.words", "index", "passages.parquet"]
    monkeypatch.undo()
    build(changed(search_params, {"bm25.k1": 0.9}), stored, tmp_path / "index")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "passages.parquet"]


class Recorded(Search):
    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []
        self.down = False

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        if self.down:
            raise WorldFault("down")
        self.asked.append((list(queries), k))
        return [[Passage(passage_id=str(i), title=query, text="") for i in range(k)] for query in queries]


@cases("entries, searches, asked")
def test_only_new_searches_reach_the_index(entries: int, searches: list[Any], asked: list[Any]) -> None:
    index = Recorded()
    cached = Cached(index, "hash", entries)
    for queries, k in searches:
        assert cached.search([*queries], k) == Recorded().search([*queries], k)
    assert [[queries, k] for queries, k in index.asked] == asked


def test_neither_a_search_that_fails_nor_a_change_of_its_result_is_remembered() -> None:
    """The hit share is that of the searches since it was asked."""
    index = Recorded()
    cached = Cached(index, "hash", 10)
    assert cached.take_hit_share() == 0
    index.down = True
    with pytest.raises(WorldFault):
        cached.search(["a"], 1)
    index.down = False
    cached.search(["a"], 1)[0].clear()
    cached.take_hit_share()
    assert [passage.title for [passage] in cached.search(["a", "b", "a"], 1)] == ["a", "b", "a"]
    assert (cached.take_hit_share(), cached.take_hit_share()) == (2 / 3, 0)


class Fixed(Ranker):
    """Ranks as it was told, and remembers how many were asked for."""

    def __init__(self, *positions: int) -> None:
        self._positions = np.array(positions, np.int64)
        self.asked: list[int] = []

    def rank(self, query: str, k: int) -> Positions:
        self.asked.append(k)
        return self._positions[:k]


@cases("rankings, constant, fused")
def test_ranks_are_fused_by_hand(rankings: list[list[int]], constant: int, fused: list[int]) -> None:
    assert fuse([np.array(ranking, np.int64) for ranking in rankings], constant).tolist() == fused


@pytest.mark.parametrize(("k", "depth"), [(2, 3), (3, 3), (4, 4)])
def test_candidates_or_k_of_each_are_fused(k: int, depth: int) -> None:
    first, second = Fixed(1, 2, 3, 4, 5), Fixed(5, 4, 3, 2, 1)
    found = Hybrid([first, second], HybridParams(rrf_constant=60, candidates=3)).rank("q", k)
    assert first.asked == second.asked == [depth]
    assert len(found) == k
    assert found[0] == (3 if depth == 3 else 2)  # the only one in both, or the first of 2, 3, 4


def test_a_damaged_index_is_refused_and_one_without_sums_is_opened(
    stored: Path, tmp_path: Path, search_params: SearchParams, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit of each file; `make hostile` flips hundreds. Offsets that cannot be are refused without sums too."""
    folder = tmp_path / "index"
    build(search_params, stored, folder)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ValueError, match=r"is missing or not as it was written|is damaged, or of another version"):
            open_index(search_params, stored, folder)
        file.write_bytes(content)
    (folder / SUMS).unlink()
    open_index(search_params, stored, folder)
    assert "has no SHA256SUMS: damage may go unnoticed; run the index stage anew" in caplog.text
    words = folder / "bm25" / bm25.VOCABULARY
    content = words.read_bytes()
    refused = 0
    for place in range(0, len(content), 8):
        words.write_bytes(content[:place] + b"\xff" * 8 + content[place + 8 :])
        try:
            open_index(search_params, stored, folder)
        except ValueError as fault:
            refused += str(words) in str(fault)
    assert refused > 10


def test_a_damaged_file_of_passages_is_to_be_brought_back(
    stored: Path, tmp_path: Path, search_params: SearchParams
) -> None:
    build(search_params, stored, tmp_path / "index")
    content = bytearray(stored.read_bytes())
    content[40] ^= 1
    stored.write_bytes(content)
    with pytest.raises(ValueError, match=r"passages.parquet is damaged .*`dvc checkout --force \S+passages.parquet`"):
        open_index(search_params, stored, tmp_path / "index")
