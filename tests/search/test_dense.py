"""Vectors by hand, FAISS of both kinds against plain cosines, and builds that are killed and go on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from agent_r1.params.stages import DenseParams
from agent_r1.search import dense
from agent_r1.search.dense import Dense, Encoder, Vectors
from tests.cases import cases

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
    return encoder.passages([f" {text}" for text in TEXTS]) @ encoder.query(query)[0]


@pytest.mark.parametrize("settings", [{}, {**IVF, "nprobe": 4}], ids=["flat", "ivf, all clusters"])
def test_the_nearest_come_first_and_fewer_clusters_find_fewer(
    corpus: Path, tmp_path: Path, dense_params: DenseParams, settings: dict[str, object]
) -> None:
    params = dense_params.model_copy(update=settings)
    dense.build(corpus, tmp_path / "dense", params, tmp_path / "vectors")
    index = Dense(tmp_path / "dense", params)
    for query in ("where is mara", "a twin country"):
        expected = np.sort(cosines(params, query))[::-1]
        found = index.rank(query, 30)
        assert sorted(found) == list(range(25))
        np.testing.assert_allclose(cosines(params, query)[found], expected, atol=1e-5)
        assert index.rank(query, 3).tolist() == found[:3].tolist()
    if settings:
        few = Dense(tmp_path / "dense", params.model_copy(update={"nprobe": 1})).rank("where is mara", 25)
        assert 1 <= len({*few.tolist()}) == len(few) < 25
        assert min(few) >= 0


def test_equal_passages_rank_in_their_order(tmp_path: Path, write_passages: Write, dense_params: DenseParams) -> None:
    corpus = write_passages(tmp_path / "passages.parquet", ["twin", "mara", "twin", "twin"])
    dense.build(corpus, tmp_path / "dense", dense_params, tmp_path / "vectors")
    assert Dense(tmp_path / "dense", dense_params).rank("twin", 4).tolist()[:3] == [0, 2, 3]


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


def test_a_killed_build_goes_on_where_it_was(
    corpus: Path, tmp_path: Path, dense_params: DenseParams, encoded: list[int]
) -> None:
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


def test_more_clusters_than_passages_are_refused(corpus: Path, tmp_path: Path, dense_params: DenseParams) -> None:
    params = dense_params.model_copy(update={"faiss": "ivf", "nlist": 26, "nprobe": 1})
    with pytest.raises(ValueError, match=r"25 passages cannot fill nlist 26 clusters; lower search\.dense\.nlist"):
        dense.build(corpus, tmp_path / "dense", params, tmp_path / "vectors")


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
    np.testing.assert_allclose(encoder.query(SENTENCES[0])[0], by_hand(params, "query: " + SENTENCES[0]), atol=1e-6)


def test_long_texts_are_cut_to_what_the_encoder_reads(dense_params: DenseParams) -> None:
    encoder = Encoder(dense_params.model_copy(update={"max_tokens": 6, "passage_prefix": ""}))
    cut, longer = encoder.passages(["tesk is a city", "tesk is a city in veld ."])  # [CLS], four words, [SEP]
    np.testing.assert_allclose(cut, longer, atol=1e-6)
    with pytest.raises(ValueError, match=r"search\.dense\.max_tokens 33 is more than encoder .* lower it to 32"):
        Encoder(dense_params.model_copy(update={"max_tokens": 33}))
