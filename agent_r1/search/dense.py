"""Dense retrieval: passages are ranked by the cosine of their vector with the query's, by FAISS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

from agent_r1.files import load_pretrained, model_hash, remove_folder, replacing, sha256
from agent_r1.params import fingerprint
from agent_r1.params.stages import DenseParams
from agent_r1.pretrained import default_device
from agent_r1.search.base import Positions, Ranker, full_texts, read_batches
from agent_r1.tables import open_rows

INDEX = "faiss.index"
SHARD = 1024  # passages
TRAINING_VECTORS = 64  # per cluster: FAISS asks for 39 at least
Vectors = NDArray[np.float32]  # [texts, dimensions], each of length 1


class Encoder:
    """A Hugging Face encoder with its prefixes and its pooling, in float32, on CUDA where there is one."""

    def __init__(self, params: DenseParams) -> None:
        """Loads the model; an OSError says that there is none, a ValueError that it reads less than `max_tokens`."""
        self._params = params
        self._tokenizer = load_pretrained(AutoTokenizer, params.encoder)
        if params.max_tokens > self._tokenizer.model_max_length:
            raise ValueError(
                f"search.dense.max_tokens {params.max_tokens} is more than encoder {params.encoder} reads; "
                f"lower it to {self._tokenizer.model_max_length}"
            )
        self._device = default_device()
        self._model = load_pretrained(AutoModel, params.encoder, dtype=torch.float32).eval().to(self._device)

    def passages(self, texts: Sequence[str]) -> Vectors:
        """The vectors of passages, in batches of about one length: padding costs as much as text."""
        prefixed = [self._params.passage_prefix + text for text in texts]
        order = sorted(range(len(texts)), key=lambda i: len(prefixed[i]))
        size = self._params.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        vectors = np.concatenate([self._encode([prefixed[i] for i in batch]) for batch in batches])
        return vectors[np.argsort(order)]

    def query(self, text: str) -> Vectors:
        """[1, dimensions] of one query, alone: its last bits would depend on the padding of a batch."""
        return self._encode([self._params.query_prefix + text])

    @torch.no_grad()
    def _encode(self, texts: Sequence[str]) -> Vectors:
        inputs = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._params.max_tokens, return_tensors="pt"
        ).to(self._device)
        hidden = self._model(**inputs).last_hidden_state
        if self._params.pooling == "cls":
            pooled = hidden[:, 0]
        else:  # the mean over the tokens that are no padding: hidden [B, T, D] -> [B, D]
            weights = inputs["attention_mask"][..., None].to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
        vectors: Any = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        return np.asarray(vectors, np.float32)


def build(source: Path, folder: Path, params: DenseParams, cache: Path) -> None:
    """Writes a FAISS index of a Parquet file of passages to a new folder, and its vectors alone to folder `cache`."""
    with open_rows(source) as file:
        count = file.metadata.num_rows
    if count < max(1, params.nlist):
        raise ValueError(f"{count} passages cannot fill nlist {params.nlist} clusters; lower search.dense.nlist")
    identity = (sha256(source), model_hash(params.encoder), params.passage_prefix, params.pooling, params.max_tokens)
    place = cache / fingerprint(*identity)  # named by all that decides the vectors
    place.mkdir(parents=True, exist_ok=True)
    for stale in set(cache.iterdir()) - {place}:
        remove_folder(stale)
    encoder = Encoder(params)
    with tqdm(total=count, desc="encoding", unit="passage", disable=None) as progress:  # None: on a terminal only
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
        """Positions of the nearest passages, best first; fewer than `k` if the searched clusters hold fewer."""
        scores, positions = self._index.search(self._encoder.query(query), min(k, self._index.ntotal))
        mask = positions[0] >= 0
        order = np.lexsort((positions[0][mask], -scores[0][mask]))
        return np.asarray(positions[0][mask][order], np.int64)


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
