"""Dense retrieval: passages are ranked by the cosine of their vector with the query's, by FAISS.

Encoding is what takes long. Its vectors are kept beside the index, a file per `SHARD` passages: a build that was killed
goes on after the last whole file, and a build with other FAISS settings or another query prefix encodes nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow.parquet as pq
from tqdm import tqdm

from agent_r1.hashes import model_hash, sha256
from agent_r1.params import DenseParams, fingerprint
from agent_r1.search.base import Positions, Ranker
from agent_r1.search.encoder import Encoder, Vectors
from agent_r1.search.passages import full_texts, read_batches
from agent_r1.tables import replacing

INDEX = "faiss.index"
SHARD = 1024  # passages
TRAINING_VECTORS = 64  # per cluster: FAISS asks for 39 at least


def build(source: Path, folder: Path, params: DenseParams, kept: Path) -> None:
    """Writes a FAISS index of a Parquet file of passages to a new folder.

    Args:
        kept: the folder for the vectors; those of other passages or of another encoder in it are removed.

    Raises:
        ValueError: there are fewer passages than clusters.
    """
    count = pq.read_metadata(source).num_rows
    if count < max(1, params.nlist):
        raise ValueError(f"{count} passages cannot fill nlist {params.nlist} clusters; lower search.dense.nlist")
    place = kept / _identity(source, params)
    _remove_others(place)
    encoder = Encoder(params)
    progress = tqdm(total=count, desc="encoding", unit="passage", disable=None)  # None: on a terminal only
    with progress:
        for vectors in encode(source, place, encoder.passages):
            progress.update(len(vectors))
    index = _empty(params, place, count)
    for vectors in _shards(place):
        index.add(vectors)
    folder.mkdir(parents=True)
    faiss.write_index(index, str(folder / INDEX))


def encode(source: Path, place: Path, encode_texts: Callable[[list[str]], Vectors]) -> Iterator[Vectors]:
    """The vectors of all passages in their order, shard by shard; each is a file of `place` before it is given."""
    for number, batch in enumerate(read_batches(source, SHARD)):
        path = place / f"{number:08d}.npy"
        if not path.exists():
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, encode_texts(full_texts(batch, " ")))
        yield np.load(path)


class Dense(Ranker):
    """A loaded FAISS index and the encoder of its queries."""

    def __init__(self, folder: Path, params: DenseParams) -> None:
        self._encoder = Encoder(params)
        self._index = faiss.read_index(str(folder / INDEX), faiss.IO_FLAG_MMAP)
        if params.faiss == "ivf":
            faiss.extract_index_ivf(self._index).nprobe = params.nprobe

    def rank(self, query: str, k: int) -> Positions:
        """Positions of the nearest passages, best first; with clusters fewer, where those looked at hold fewer."""
        scores, positions = self._index.search(self._encoder.query(query), min(k, self._index.ntotal))
        found = positions[0] >= 0
        order = np.lexsort((positions[0][found], -scores[0][found]))
        return np.asarray(positions[0][found][order], np.int64)


def _identity(source: Path, params: DenseParams) -> str:
    """What the vectors depend on."""
    encoder = model_hash(params.encoder)
    return fingerprint(sha256(source), encoder, params.passage_prefix, params.pooling, params.max_tokens)


def _remove_others(place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for other in place.parent.iterdir():
        if other != place:
            shutil.rmtree(other)


def _shards(place: Path) -> Iterator[Vectors]:
    return map(np.load, sorted(place.glob("[0-9]*.npy")))


def _empty(params: DenseParams, place: Path, count: int) -> Any:
    """An index without vectors; the clusters of an IVF are found from vectors spread evenly over the corpus."""
    dimensions = next(_shards(place)).shape[1]
    if params.faiss == "flat":
        return faiss.IndexFlatIP(dimensions)
    stride = max(1, count // (TRAINING_VECTORS * params.nlist))
    quantizer = faiss.IndexFlatIP(dimensions)
    index = faiss.IndexIVFFlat(quantizer, dimensions, params.nlist, faiss.METRIC_INNER_PRODUCT)
    index.train(np.concatenate([vectors[::stride] for vectors in _shards(place)]))
    return index
