"""Vectors by hand, FAISS of both kinds against plain cosines, and builds that are killed and go on."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from agent_r1.params.search import DenseParams
from agent_r1.search import dense
from agent_r1.search.dense import Dense, Encoder, Vectors
from tests.cases import cases, tables

Write = Callable[[Path, Sequence[str]], Path]
SUBJECTS, PLACES = ("mara", "quill", "tesk", "veld", "norn"), ("city", "country", "twin", "born", "in")
TEXTS = [f"{subject} is a {place}" for subject in SUBJECTS for place in PLACES]
SENTENCES = ["tesk is a city in veld .", "twin", "mara quill was born in tesk", "veld is a country"]
IVF = {"faiss": "ivf", "nlist": 4}


@pytest.fixture
def corpus(tmp_path: Path, write_passages: Write, monkeypatch: pytest.MonkeyPatch) -> Path:
    """25 passages in shards of 4, the last with one."""
    monkeypatch.setattr(dense, "SHARD", 4)
    return write_passages(tmp_path / "passages.parquet", TEXTS)


def cosines(params: DenseParams, query: str) -> np.ndarray:
    encoder = Encoder(params)
    return encoder.passages([f" {text}" for text in TEXTS]) @ encoder.queries([query])[0]


@pytest.mark.parametrize("settings", [{}, {**IVF, "nprobe": 4}], ids=["flat", "ivf, all clusters"])
def test_the_nearest_come_first_and_fewer_clusters_find_fewer(
    corpus: Path, tmp_path: Path, dense_params: DenseParams, settings: dict[str, object]
) -> None:
    params = dense_params.model_copy(update=settings)
    dense.build(corpus, tmp_path / "dense", params, tmp_path / "vectors")
    index = Dense(tmp_path / "dense", params, 25)
    for query in ("where is mara", "a twin country"):
        expected = np.sort(cosines(params, query))[::-1]
        found = index.rank(query, 30)
        assert sorted(found) == list(range(25))
        np.testing.assert_allclose(cosines(params, query)[found], expected, atol=2e-3)
        assert index.rank(query, 3).tolist() == found[:3].tolist()
    if settings:
        few = Dense(tmp_path / "dense", params.model_copy(update={"nprobe": 1}), 25).rank("where is mara", 25)
        assert 1 <= len({*few.tolist()}) == len(few) < 25
        assert min(few) >= 0


def test_equal_passages_rank_in_their_order(tmp_path: Path, write_passages: Write, dense_params: DenseParams) -> None:
    corpus = write_passages(tmp_path / "passages.parquet", ["twin", "mara", "twin", "twin"])
    dense.build(corpus, tmp_path / "dense", dense_params, tmp_path / "vectors")
    assert Dense(tmp_path / "dense", dense_params, 4).rank("twin", 4).tolist()[:3] == [0, 2, 3]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the shards that are encoded, and -1 for a kill before the third."""
    shards: list[int] = []
    encode = Encoder.passages

    def counted(self: Encoder, texts: Sequence[str]) -> Vectors:
        if len(shards) == 2 and -1 not in shards:
            shards.append(-1)
            raise KeyboardInterrupt
        shards.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(Encoder, "passages", counted)
    return shards


def test_killed_build_goes_on(corpus: Path, tmp_path: Path, dense_params: DenseParams, encoded: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        dense.build(corpus, tmp_path / "dense", dense_params, tmp_path / "vectors")
    assert not (tmp_path / "dense").exists()
    dense.build(corpus, tmp_path / "dense", dense_params, tmp_path / "vectors")
    assert encoded == [4, 4, -1, 4, 4, 4, 4, 1], "no shard twice"
    dense.build(corpus, tmp_path / "again", dense_params, tmp_path / "other_vectors")
    assert (tmp_path / "again" / dense.INDEX).read_bytes() == (tmp_path / "dense" / dense.INDEX).read_bytes()


@cases("changes, again")
def test_only_what_the_vectors_depend_on_encodes_again(
    corpus: Path, tmp_path: Path, dense_params: DenseParams, encoded: list[int], changes: dict[str, Any], again: bool
) -> None:
    encoded.append(-1)  # no kill
    dense.build(corpus, tmp_path / "dense", dense_params, tmp_path / "vectors")
    encoded.clear()
    encoded.append(-1)
    dense.build(corpus, tmp_path / "changed", dense_params.model_copy(update=changes), tmp_path / "vectors")
    assert sum(encoded) == (25 if again else 0) - 1
    assert len(list((tmp_path / "vectors").iterdir())) == 1, "vectors of another encoding are removed"


MANY = [" ".join(words) for words in itertools.product(SUBJECTS, PLACES, SUBJECTS, ("", "city", "twin of"))]
KINDS = tables(Path(__file__).parent)["kinds_of_vectors"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_same_on_two_builds_and_ranks_alone_as_in_company(
    kind: str, tmp_path: Path, write_passages: Write, dense_params: DenseParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """450 passages of which many are equal, in blocks of 64; the second build on another number of threads."""
    monkeypatch.setattr(dense, "BLOCK", 64)
    corpus = write_passages(tmp_path / "passages.parquet", MANY + MANY[:75])
    params = dense_params.model_copy(update={**KINDS[kind], "batch_size": 64})
    threads = faiss.omp_get_max_threads()
    for number in (1, 2):
        faiss.omp_set_num_threads(number)
        dense.build(corpus, tmp_path / str(number), params, tmp_path / "vectors")
    faiss.omp_set_num_threads(threads)
    files = [(tmp_path / name / dense.INDEX).read_bytes() for name in "12"]
    assert files[0] == files[1]
    index = Dense(tmp_path / "1", params, 450)
    queries = ["where is mara", "twin", *TEXTS, "a twin country of norn in veld ."]
    rankings = index.rank_all(queries, 5)
    assert [ranking.tolist() for ranking in rankings] == [index.rank(query, 5).tolist() for query in queries]
    encoder = Encoder(params)
    scores = encoder.queries(queries) @ encoder.passages([f" {text}" for text in MANY + MANY[:75]]).T
    best = np.sort(scores)[:, ::-1][:, :5]
    loss = best - np.take_along_axis(scores, np.array(rankings), 1)
    assert loss.mean() < (0.02 if kind == "pq" else 0.005)
    same = index.rank("mara city mara", 450 if kind in ("flat", "sq8") else 60).tolist()
    equal_ones = [row for row in same if row in (0, 375)]
    # exact vectors of equal texts differ in their last bits, by the padding of their batches
    assert sorted(equal_ones) == [0, 375] if params.exact else equal_ones == [0, 375]


def test_index_of_other_passages_or_another_shape_is_refused(
    corpus: Path, tmp_path: Path, dense_params: DenseParams
) -> None:
    dense.build(corpus, tmp_path / "dense", dense_params, tmp_path / "vectors")
    refused = r"faiss\.index has vectors, dimensions and metric \(25, 16, 0\), .* want \(24, 16, 0\); run the index"
    with pytest.raises(ValueError, match=refused):
        Dense(tmp_path / "dense", dense_params, 24)
    faiss.write_index(faiss.IndexFlatL2(16), str(tmp_path / "dense" / dense.INDEX))
    with pytest.raises(ValueError, match=r"\(0, 16, 1\), and these"):
        Dense(tmp_path / "dense", dense_params, 0)


def test_index_that_memory_cannot_hold_or_passages_cannot_fill_is_refused_before_it_is_encoded(
    corpus: Path, tmp_path: Path, dense_params: DenseParams, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded.append(-1)  # no kill
    params = dense_params.model_copy(update=KINDS["pq"])
    with pytest.raises(ValueError, match=r"pq learns from 256 passages or more, of which there are 25, and pq_b"):
        dense.build(corpus, tmp_path / "dense", params, tmp_path / "vectors")
    clusters = {"faiss": "ivf", "nlist": 26, "nprobe": 1}
    with pytest.raises(ValueError, match=r"25 passages cannot fill nlist 26 clusters; lower search\.dense\.nlist"):
        dense.build(corpus, tmp_path / "dense", dense_params.model_copy(update=clusters), tmp_path / "vectors")
    free = SimpleNamespace(available=1799)  # 25 x (64 + 8) is 1800
    monkeypatch.setattr(dense.psutil, "virtual_memory", lambda: free)
    with pytest.raises(ValueError, match=r"faiss: flat takes 0\.0 GB of memory for 25 passages, and 0\.0 GB are free"):
        dense.build(corpus, tmp_path / "dense", dense_params, tmp_path / "vectors")
    assert encoded == [-1]


def by_hand(params: DenseParams, text: str) -> Any:
    """The unit vector of one text, alone and without padding."""
    tokenizer, model = AutoTokenizer.from_pretrained(params.encoder), AutoModel.from_pretrained(params.encoder).eval()
    with torch.no_grad():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    vector = hidden[0] if params.pooling == "cls" else hidden.mean(0)
    return (vector / vector.norm()).numpy()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_have_their_prefix_their_pooling_and_length_1(dense_params: DenseParams, pooling: str) -> None:
    params = dense_params.model_copy(update={"pooling": pooling})
    encoder = Encoder(params)
    expected = [by_hand(params, "passage: " + text) for text in SENTENCES]
    np.testing.assert_allclose(encoder.passages(SENTENCES), expected, atol=1e-6)
    expected = [by_hand(params, "query: " + text) for text in SENTENCES]
    np.testing.assert_allclose(encoder.queries(SENTENCES), expected, atol=1e-6)


def test_long_texts_are_cut_to_what_the_encoder_reads(dense_params: DenseParams) -> None:
    encoder = Encoder(dense_params.model_copy(update={"max_tokens": 6, "passage_prefix": ""}))
    cut, longer = encoder.passages(["tesk is a city", "tesk is a city in veld ."])  # [CLS], four words, [SEP]
    np.testing.assert_allclose(cut, longer, atol=1e-6)
    with pytest.raises(ValueError, match=r"search\.dense\.max_tokens 33 is more than encoder .* lower it to 32"):
        Encoder(dense_params.model_copy(update={"max_tokens": 33}))
