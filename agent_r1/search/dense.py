"""Dense retrieval: passages are ranked by the cosine of their vector with the query's, by FAISS."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import psutil
import torch
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

from agent_r1.files import load_pretrained, model_hash, replacing, sha256
from agent_r1.params.search import DenseParams
from agent_r1.pretrained import compute_dtype, default_device
from agent_r1.records import Floats32
from agent_r1.search.base import Positions, Ranker, full_texts, read_batches, workplace
from agent_r1.search.prebuilt import Prebuilt
from agent_r1.tables import open_rows

INDEX = "faiss.index"
SHARD = 1024  # passages
TRAINING_VECTORS = 64  # per cluster: FAISS asks for 39 at least
CODES = 256  # clusters of each byte of a PQ
ROWS = 4  # queries that are computed together, and STEP tokens by which their lengths are filled up
STEP = 8
ALONE = 16  # queries: FAISS computes up to 19 one by one, and more by products of matrices, which round otherwise
TOGETHER = 64  # queries that share a scan of all vectors
BLOCK = 1 << 14  # vectors that are decoded at a time
SPARE = 8  # passages behind the k-th, among which equal ones show
SAMPLES = 64  # passages that show whether vectors of others are theirs
OWN = 0.9  # of them are nearest to their own vector
Vectors = Floats32  # [texts, dimensions], each of length 1
Nearest = tuple[Floats32, Positions, Floats32]  # scores, positions, the most that others score
faiss_any: Any = faiss  # whose stubs know few keywords and helpers


class Encoder:
    """A Hugging Face encoder with its prefixes and its pooling, on CUDA in bfloat16, else in float32."""

    def __init__(self, params: DenseParams) -> None:
        """Loads the model; an OSError says that there is none, a ValueError that it reads less than `max_tokens`."""
        self.params = params
        self._tokenizer = load_pretrained(AutoTokenizer, params.encoder)
        if params.max_tokens > self._tokenizer.model_max_length:
            raise ValueError(
                f"search.dense.max_tokens {params.max_tokens} is more than encoder {params.encoder} reads; "
                f"lower it to {self._tokenizer.model_max_length}"
            )
        self._device = default_device()
        dtype = compute_dtype("auto", self._device)
        self._model = load_pretrained(AutoModel, params.encoder, dtype=dtype).eval().to(self._device)
        self.dimensions: int = self._model.config.hidden_size

    def passages(self, texts: Sequence[str]) -> Vectors:
        """The vectors of passages, in batches of about one length: padding costs as much as text."""
        prefixed = [self.params.passage_prefix + text for text in texts]
        order = sorted(range(len(texts)), key=lambda i: len(prefixed[i]))
        size = self.params.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        vectors = np.concatenate([self._encode([prefixed[i] for i in batch]) for batch in batches])
        return vectors[np.argsort(order)]

    def queries(self, texts: Sequence[str]) -> Vectors:
        """The vectors of queries, each with the bits that it has alone.

        Last bits depend on the shape of what is computed, and not on what else is in it: always `ROWS` texts, of a
        length that follows from the query alone.
        """
        prefixed = [self.params.query_prefix + text for text in texts]
        vectors = np.empty((len(texts), self.dimensions), np.float32)
        for length, places in self._by_length(prefixed).items():
            for start in range(0, len(places), ROWS):
                batch = places[start : start + ROWS]
                rows = [prefixed[place] for place in batch] + [""] * (ROWS - len(batch))
                vectors[batch] = self._encode(rows, length)[: len(batch)]
        return vectors

    def _by_length(self, texts: Sequence[str]) -> Mapping[int, list[int]]:
        """The places of texts by their tokens, filled up to multiples of `STEP`."""
        most = self.params.max_tokens
        places = defaultdict[int, list[int]](list)
        for place, text in enumerate(texts):
            tokens = len(self._tokenizer(text, truncation=True, max_length=most)["input_ids"])
            places[min(most, -(-tokens // STEP) * STEP)].append(place)
        return places

    @torch.no_grad()
    def _encode(self, texts: Sequence[str], length: int = 0) -> Vectors:
        """The vectors of texts, filled up to the longest of them, or to a `length` in tokens."""
        inputs = self._tokenizer(
            list(texts),
            padding="max_length" if length else True,
            truncation=True,
            max_length=length or self.params.max_tokens,
            return_tensors="pt",
        ).to(self._device)
        hidden = self._model(**inputs).last_hidden_state.float()
        if self.params.pooling == "cls":
            pooled = hidden[:, 0]
        else:  # the mean over the tokens that are no padding: hidden [B, T, D] -> [B, D]
            weights = inputs["attention_mask"][..., None].to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
        vectors: Any = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        return np.asarray(vectors, np.float32)


def build(source: Path, folder: Path, params: DenseParams, cache: Path, earlier: Path | None = None) -> None:
    """Writes a FAISS index of a Parquet file of passages to a new folder, and its vectors alone to folder `cache`.

    An `earlier` index, which holds these vectors, saves encoding, as does `params.vectors`. Raises ValueError for
    settings that do not fit the passages, the encoder or the memory, and for vectors of others.
    """
    with open_rows(source) as file:
        count = file.metadata.num_rows
    if count < max(1, params.nlist):
        raise ValueError(f"{count} passages cannot fill nlist {params.nlist} clusters; lower search.dense.nlist")
    encoder = Encoder(params)
    _require_fit(params, encoder.dimensions, count)
    if params.vectors:
        shards = partial(_others(source, encoder).shards, SHARD)
    else:
        shards = partial(_stored, _encoded(source, count, encoder, cache, earlier))
    index = _empty(params, encoder.dimensions, np.concatenate([*_spread(shards(), params, count)]))
    for vectors in shards():
        index.add(_rounded(vectors, params))
    folder.mkdir(parents=True)
    faiss.write_index(index, str(folder / INDEX))


def _encoded(source: Path, count: int, encoder: Encoder, cache: Path, earlier: Path | None) -> Path:
    """The folder with the vectors of all shards; those that are there are not encoded again."""
    params = encoder.params
    identity = (sha256(source), model_hash(params.encoder), params.passage_prefix, params.pooling, params.max_tokens)
    place = workplace(cache, *identity)
    held = _read(earlier) if earlier else None
    if isinstance(held, faiss.IndexIVF):
        held.make_direct_map()
    with tqdm(total=count, desc="encoding", unit="passage", disable=None) as progress:  # None: on a terminal only
        for number, batch in enumerate(read_batches(source, SHARD)):
            path = place / f"{number:08d}.npy"
            if not path.exists():
                vectors = (
                    held.reconstruct_n(number * SHARD, batch.num_rows)
                    if held
                    else encoder.passages(full_texts(batch, " "))
                )
                with replacing(path) as temporary, temporary.open("wb") as shard:
                    np.save(shard, vectors.astype(np.float32 if params.exact else np.float16))
            progress.update(batch.num_rows)
    return place


def _require_fit(params: DenseParams, dimensions: int, count: int) -> None:
    """Refuses an index that cannot be, before hours of encoding."""
    if params.faiss == "pq" and (dimensions % params.pq_bytes or count < CODES):
        raise ValueError(
            f"search.dense.faiss: pq learns from {CODES} passages or more, of which there are {count}, and pq_bytes "
            f"{params.pq_bytes} has to divide the encoder's {dimensions} dimensions; correct it, or set faiss: sq8"
        )
    size = {"sq8": dimensions, "pq": params.pq_bytes + (params.rescore > 0) * dimensions}.get(
        params.faiss, 4 * dimensions
    )
    need = count * (size + 8)  # and its number
    available = psutil.virtual_memory().available
    if need > available:
        raise ValueError(
            f"search.dense.faiss: {params.faiss} takes {need / 1e9:.1f} GB of memory for {count} passages, and "
            f"{available / 1e9:.1f} GB are free; take a smaller kind: sq8, or pq without rescore"
        )


class Dense(Ranker):
    """A FAISS index, memory-mapped, and the encoder of its queries."""

    def __init__(self, folder: Path, params: DenseParams, passages: int) -> None:
        """Opens a folder that `build` wrote for `passages` passages; ValueError for an index of others."""
        self._encoder = Encoder(params)
        self._params = params
        self._index = _read(folder)
        shape = (self._index.ntotal, self._index.d, self._index.metric_type)
        expected = (passages, self._encoder.dimensions, faiss.METRIC_INNER_PRODUCT)
        if shape != expected:
            raise ValueError(
                f"{folder / INDEX} has vectors, dimensions and metric {shape}, and these passages and {params.encoder} "
                f"want {expected}; run the index stage (`dvc repro index`)"
            )

    def rank(self, query: str, k: int) -> Positions:
        """Positions of the nearest passages, best first; fewer than `k` if the searched clusters hold fewer."""
        return self.rank_all([query], k)[0]

    def rank_all(self, queries: Sequence[str], k: int) -> list[Positions]:
        vectors = self._encoder.queries(queries)
        size = TOGETHER if self._scans else ALONE
        starts = range(0, len(vectors), size)
        return [ranking for start in starts for ranking in self._nearest(vectors[start : start + size], k, SPARE)]

    @property
    def _scans(self) -> bool:
        """Whether a search looks at every vector, and by no codes but its own."""
        return not (self._params.nlist or self._params.pq_bytes)

    def _nearest(self, vectors: Vectors, k: int, spare: int) -> Iterator[Positions]:
        """The nearest of each vector; one whose k-th may be as near as others than `spare` more is searched again."""
        depth = min(k + spare, self._index.ntotal)
        search = self._search_together if self._scans and len(vectors) > 1 else self._search
        for vector, near, row, rest in zip(vectors, *search(vectors, depth), strict=True):
            mask = row >= 0
            order = np.lexsort((row[mask], -near[mask]))[:k]
            if depth < self._index.ntotal and mask[-1] and near[order[-1]] <= rest:
                yield from self._nearest(vector[None], k, 4 * spare)
            else:
                yield np.asarray(row[mask][order], np.int64)

    def _search(self, vectors: Vectors, depth: int) -> Nearest:
        scores, positions = self._index.search(vectors, depth, params=self._how(depth))
        return scores, positions, scores[:, -1]

    def _search_together(self, vectors: Vectors, depth: int) -> Nearest:
        """In one scan, by products of matrices; what it finds is scored anew, as FAISS scores one query."""
        rough, positions = self._scan(torch.from_numpy(vectors), depth)
        computer = self._index.get_distance_computer()
        scores = np.empty_like(rough)
        for number, vector in enumerate(vectors):
            computer.set_query(faiss_any.swig_ptr(vector))
            scores[number] = [computer(position) for position in positions[number].tolist()]
        slack = 2 * vectors.shape[1] * np.finfo(np.float32).eps  # of sums of products in another order
        return scores, positions, rough[:, -1] + slack

    def _scan(self, queries: torch.Tensor, depth: int) -> tuple[Floats32, Positions]:
        """Scores and positions of about the nearest, best first; codes are decoded once for all queries."""
        parts = []
        for start in range(0, self._index.ntotal, BLOCK):
            block = torch.from_numpy(self._index.reconstruct_n(start, min(BLOCK, self._index.ntotal - start)))
            scores, places = torch.topk(queries @ block.T, min(depth, len(block)))
            parts.append((scores, start + places))
        scores, positions = (torch.cat(columns, 1) for columns in zip(*parts, strict=True))
        best, order = torch.topk(scores, depth)
        return best.numpy(), positions.gather(1, order).numpy()

    def _how(self, depth: int) -> Any:
        """FAISS's parameters of a search for so many passages."""
        clusters = faiss_any.SearchParametersIVF(nprobe=self._params.nprobe) if self._params.nlist else None
        if not self._params.rescore:
            return clusters
        factor = max(1.0, (self._params.rescore + 0.5) / depth)  # FAISS rounds the product down
        return faiss_any.IndexRefineSearchParameters(k_factor=factor, base_index_params=clusters)


def _read(folder: Path) -> Any:
    """A FAISS index whose vectors stay on disk, to be read where they are looked at."""
    return faiss.read_index(str(folder / INDEX), faiss.IO_FLAG_MMAP_IFC)


def _stored(place: Path) -> Iterator[Vectors]:
    """The vectors of all shards, as they are stored."""
    return (np.load(path) for path in sorted(place.glob("[0-9]*.npy")))


def _others(source: Path, encoder: Encoder) -> Prebuilt:
    """The index that others built. ValueError where too few of the first passages are nearest to their own vector."""
    prebuilt = Prebuilt(Path(encoder.params.vectors), source, encoder.dimensions)
    texts = full_texts(next(read_batches(source, SAMPLES)), " ")
    scores = encoder.passages(texts) @ next(prebuilt.shards(SAMPLES)).T
    own = int((scores.argmax(1) == np.arange(len(texts))).sum())
    if own < OWN * len(texts):
        raise ValueError(
            f"{encoder.params.vectors}: by {encoder.params.encoder} {own} of {len(texts)} passages are nearest to "
            "their own vector; name the encoder, pooling and prefix that made them, and prepare the corpus in order"
        )
    return prebuilt


def _rounded(vectors: Vectors, params: DenseParams) -> Vectors:
    """In float32. Kinds that hold codes take vectors rounded to float16, as they are stored."""
    return vectors.astype(np.float32 if params.exact else np.float16).astype(np.float32)


def _spread(shards: Iterable[Vectors], params: DenseParams, count: int) -> Iterator[Vectors]:
    """Of `count` vectors as many as an index learns from, spread evenly over the corpus."""
    stride = max(1, count // (TRAINING_VECTORS * max(CODES, params.nlist)))
    return (_rounded(vectors[::stride], params) for vectors in shards)


def _empty(params: DenseParams, dimensions: int, training: Vectors) -> Any:
    """An index without vectors, which has learned from some."""
    lists = f"IVF{params.nlist}," if params.nlist else ""
    codes = {"sq8": "SQ8", "pq": f"PQ{params.pq_bytes}np"}.get(params.faiss, "Flat")
    rescored = ",Refine(SQ8)" if params.rescore else ""
    index = faiss.index_factory(dimensions, lists + codes + rescored, faiss.METRIC_INNER_PRODUCT)
    index.train(training)
    return index
