"""Flat indexes that others built, as FAISS writes them: their vectors serve as if encoded, or the file is refused."""

from collections.abc import Callable, Sequence
from pathlib import Path

import faiss
import numpy as np
import pytest

from agent_r1.params.search import DenseParams
from agent_r1.records import Passage
from agent_r1.search import dense
from agent_r1.search.dense import Dense, Encoder
from agent_r1.tables import write_rows
from tests.cases import cases
from tests.search.test_dense import TEXTS

Prepare = Callable[[Sequence[str]], Path]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """The 25 passages, in shards of 4, under ids of their maker."""
    monkeypatch.setattr(dense, "SHARD", 4)

    def write(ids: Sequence[str]) -> Path:
        passages = [Passage(passage_id=each, title="", text=text) for each, text in zip(ids, TEXTS, strict=True)]
        write_rows(tmp_path / "passages.parquet", passages, Passage)
        return tmp_path / "passages.parquet"

    return write


@pytest.fixture
def vectors(dense_params: DenseParams) -> np.ndarray:
    return Encoder(dense_params).passages([f" {text}" for text in TEXTS])


@pytest.fixture
def params(dense_params: DenseParams, tmp_path: Path) -> DenseParams:
    return dense_params.model_copy(update={"vectors": str(tmp_path / "e5_Flat.index")})


def write_index(path: str, vectors: np.ndarray, metric: int = 0) -> None:
    """As Search-R1's index_builder.py: `index_factory(dim, "Flat", METRIC_INNER_PRODUCT)`, `add`, `write_index`."""
    index = faiss.index_factory(vectors.shape[1], "Flat", metric)
    index.add(vectors)
    faiss.write_index(index, path)


COUNTED = [str(number) for number in range(25)]
NAMED = [f"page-{number}" for number in range(25)]


@pytest.mark.parametrize(
    ("ids", "metric"),
    [(COUNTED, 0), ([str(number + 1) for number in range(25)], 1), (NAMED, 0)],
    ids=["from 0, as wiki-18", "from 1, as DPR, by distance", "no numbers"],
)
def test_vectors_of_others_give_the_index_that_encoding_gives(
    ids: list[str], metric: int, prepare: Prepare, params: DenseParams, vectors: np.ndarray, tmp_path: Path
) -> None:
    corpus = prepare(ids)
    write_index(params.vectors, vectors, metric)
    before = Path(params.vectors).read_bytes()
    dense.build(corpus, tmp_path / "taken", params, tmp_path / "cache")
    assert Path(params.vectors).read_bytes() == before
    assert not (tmp_path / "cache").exists(), "they are kept once"
    held = Dense(tmp_path / "taken", params, 25)._index.reconstruct_n(0, 25)
    assert held.tobytes() == vectors.tobytes()
    sq8 = params.model_copy(update={"faiss": "sq8"})
    dense.build(corpus, tmp_path / "rounded", sq8, tmp_path / "cache")
    dense.build(corpus, tmp_path / "own", sq8.model_copy(update={"vectors": ""}), tmp_path / "cache")
    assert len({(tmp_path / name / dense.INDEX).read_bytes() for name in ("rounded", "own")}) == 1


def test_passages_that_came_twice_leave_gaps_in_the_ids(
    prepare: Prepare, params: DenseParams, vectors: np.ndarray, tmp_path: Path
) -> None:
    corpus = prepare([str(number) for number in range(26) if number != 9])
    write_index(params.vectors, np.insert(vectors, 9, vectors[3], axis=0))
    dense.build(corpus, tmp_path / "taken", params, tmp_path / "cache")
    assert Dense(tmp_path / "taken", params, 25)._index.reconstruct_n(0, 25).tobytes() == vectors.tobytes()


ROWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "more rows": lambda vectors: np.concatenate([vectors, vectors[:1]]),
    "order": lambda vectors: np.roll(vectors, 1, axis=0),
    "dimensions": lambda vectors: np.ascontiguousarray(vectors[:, :8]),
    "length": lambda vectors: np.concatenate([vectors[:20], 3 * vectors[20:]]),
    "nan": lambda vectors: np.concatenate([vectors[:20], np.nan * vectors[20:]]),
}
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-4],
    "empty": lambda content: b"",
    "count": lambda content: content[:8] + (2**62).to_bytes(8, "little") + content[16:],
    "HNSW": lambda content: bytes(faiss.serialize_index(faiss.index_factory(16, "HNSW32", 0))),
    "ids": lambda content: bytes(faiss.serialize_index(faiss.index_factory(16, "IDMap,Flat", 0))),
}


@cases("ids, change, message")
def test_an_index_of_others_that_is_not_the_corpus_s_is_refused(
    ids: str, change: str, message: str, prepare: Prepare, params: DenseParams, vectors: np.ndarray, tmp_path: Path
) -> None:
    own = {"numbers": COUNTED, "3 is 30": [*COUNTED[:3], "30", *COUNTED[4:]], "names": NAMED}
    write_index(params.vectors, ROWS.get(change, np.asarray)(vectors))
    file = Path(params.vectors)
    file.write_bytes(BYTES.get(change, bytes)(file.read_bytes()))
    if change == "pooling":
        params = params.model_copy(update={"pooling": "cls"})
    if change == "missing":
        file.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=message) as fault:
        dense.build(prepare(own[ids]), tmp_path / "taken", params, tmp_path / "cache")
    assert str(file) in str(fault.value)
    assert not (tmp_path / "taken").exists()
