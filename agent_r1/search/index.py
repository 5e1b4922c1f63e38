"""The configured index: built into a folder, and opened again only with the same passages, settings and encoder."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
from pydantic import BaseModel

from agent_r1.files import SUMS, model_hash, remove_folder, replaced_folder, sha256, write_sums
from agent_r1.params.search import BM25Params, DenseParams, HybridParams, SearchKind, SearchParams
from agent_r1.records import Passage
from agent_r1.search import bm25
from agent_r1.search.base import Passages, Positions, Ranker, Search, read_batches, store
from agent_r1.search.bm25 import BM25
from agent_r1.search.remote import ANEW, Health, RemoteIndex, connect

META = "meta.json"
PASSAGES = "passages.arrow"
BM25_FOLDER = "bm25"
DENSE_FOLDER = "dense"
_REMEDY = "run the index stage (`dvc repro index`)"

logger = logging.getLogger(__name__)


class Cached(Search):
    """Remembers the latest successful searches of an index, by its hash, the query and k; each has one result."""

    def __init__(self, index: Search, index_hash: str, entries: int) -> None:
        """Remembers at most so many searches; with 0 every search goes to the index."""
        self._index = index
        self.index_hash = index_hash
        self._entries = entries
        self._results: OrderedDict[tuple[str, str, int], list[Passage]] = OrderedDict()
        self._searches = self._hits = 0
        self._lock = Lock()  # an index is asked from other threads than the loop's

    @property
    def waits(self) -> bool:
        return self._index.waits

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        keys = [(self.index_hash, query, k) for query in queries]
        with self._lock:
            results = {key: self._results[key] for key in keys if key in self._results}
        missing = [key for key in dict.fromkeys(keys) if key not in results]
        if missing:
            fresh = self._index.search([query for _, query, _ in missing], k)
            results.update(zip(missing, fresh, strict=True))
        with self._lock:
            for key in keys:  # remembers and counts as one search after the other
                self._searches += 1
                self._hits += key in self._results
                self._results[key] = results[key]
                self._results.move_to_end(key)
                if len(self._results) > self._entries:
                    self._results.popitem(last=False)
        return [list(results[key]) for key in keys]

    def read(self, title: str) -> list[Passage]:
        return self._index.read(title)

    def take_hit_share(self) -> float:
        """The share of remembered searches since the last call; 0 without any search."""
        share = self._hits / self._searches if self._searches else 0.0
        self._searches = self._hits = 0
        return share


@dataclass(frozen=True)
class Hybrid(Ranker):
    """Reciprocal rank fusion of the best `candidates` of each ranker, or of the best `k` if that is more."""

    rankers: Sequence[Ranker]
    params: HybridParams

    def rank(self, query: str, k: int) -> Positions:
        return self.rank_all([query], k)[0]

    def rank_all(self, queries: Sequence[str], k: int) -> list[Positions]:
        depth = max(k, self.params.candidates)
        rankings = [ranker.rank_all(queries, depth) for ranker in self.rankers]
        rows = ([ranking[place] for ranking in rankings] for place in range(len(queries)))
        return [fuse(row, self.params.rrf_constant)[:k] for row in rows]


def fuse(rankings: Sequence[Positions], constant: int) -> Positions:
    """Everything that is ranked anywhere, by the sum of `1 / (constant + rank)`, ranks from 1; best first.

    Reciprocal rank fusion: Cormack, Clarke and Büttcher, SIGIR 2009, with 60 for the constant. Equal sums rank by
    position.
    """
    sums: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, position in enumerate(ranking.tolist(), start=1):
            sums[position] += 1 / (constant + rank)
    return np.array(sorted(sums, key=lambda position: (-sums[position], position)), np.int64)


class Meta(BaseModel):
    """How an index was built: the file `meta.json` beside it."""

    kind: SearchKind
    size: int  # passages
    passages_hash: str  # of the Parquet file
    bm25: BM25Params | None  # the settings that have an effect; None for the others
    dense: DenseParams | None
    hybrid: HybridParams | None
    encoder_hash: str = ""  # of a dense or hybrid index; "" of the others
    served_hash: str  # of a remote index, as its server gives it; "" of the others
    known_as: str = ""  # the hash of the index that it replaced, where that one ranks alike; else ""

    def is_built_as(self, other: Meta) -> bool:
        """Whether two indexes were built from the same with the same settings."""
        return self == other.model_copy(update={"known_as": self.known_as})


@dataclass(frozen=True)
class Index(Search):
    """A ranker and the passages that it ranks."""

    ranker: Ranker
    passages: Passages

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [self.passages.at(positions) for positions in self.ranker.rank_all(queries, k)]

    def read(self, title: str) -> list[Passage]:
        return self.passages.of_title(title)


def build(params: SearchParams, passages: Path, folder: Path) -> None:
    """Writes the configured index of a Parquet file of passages, whole or not at all; an older one is replaced.

    The same passages give the same bytes. A build that was killed goes on from what it counted or encoded, beside the
    folder. Vectors stay there if the index does not hold them itself; else the next build takes them from the index.
    Raises FileNotFoundError if there is no file, OSError if there is no encoder, ValueError if there is nothing to
    index or the server has other passages, and WorldFault if there is no server.
    """
    with replaced_folder(folder) as fresh:
        fresh.mkdir()
        if params.kind == "remote":
            served = connect(params.remote).health()
            source = f"the index served at {params.remote.url}"
            _refuse_other_passages(source, served.passages_hash, passages, "serve one of these passages")
            meta = _meta(params, served.size, served.passages_hash, served=served.index_hash)
        else:
            meta = _build_local(params, passages, fresh, folder)
        _seal(fresh, meta)
        name = _name_of_alike(meta, folder)
        if name and name != describe(fresh).index_hash:
            _seal(fresh, meta.model_copy(update={"known_as": name}))
    if meta.dense and meta.dense.exact:
        remove_folder(_beside(folder, "vectors"))


def open_index(params: SearchParams, passages: Path, folder: Path) -> Cached:
    """The index in a folder, if it is the configured one of these passages.

    Raises FileNotFoundError if there is no index, ValueError if it is not as it was built, or was built from other
    passages, with other settings or with another encoder, or the server serves another index, and WorldFault if there
    is no server.
    """
    served = describe(folder)  # reads all of it, before anything is taken from it
    meta = _read_meta(folder)
    _refuse_other_passages(f"the index at {folder}", meta.passages_hash, passages, _REMEDY)
    expected = _meta(params, meta.size, meta.passages_hash, encoder=meta.encoder_hash, served=meta.served_hash)
    if not meta.is_built_as(expected):
        raise ValueError(f"the index at {folder} was built with other settings than search: has now; {_REMEDY}")
    index = connect(params.remote, meta.served_hash) if meta.kind == "remote" else open_local(folder)
    if isinstance(index, RemoteIndex):
        index_hash = index.health().index_hash
        if index_hash != meta.served_hash:
            raise ValueError(
                f"{params.remote.url} serves index {index_hash[:12]}, and {meta.served_hash[:12]} was pinned; serve "
                f"that one, or {ANEW}"
            )
    return Cached(index, served.index_hash, params.cache_entries)


def open_local(folder: Path) -> Index:
    """The index in a folder."""
    meta = _read_meta(folder)
    if meta.kind == "remote":
        raise ValueError(f"{folder} only names an index that another server serves; give the folder of a built one")
    if meta.dense:
        encoder_hash = model_hash(meta.dense.encoder)
        if meta.encoder_hash != encoder_hash:
            raise ValueError(
                f"the index at {folder} was built with another encoder ({meta.encoder_hash[:12]}) than "
                f"{meta.dense.encoder} is now ({encoder_hash[:12]}); put the old one back, or {ANEW}"
            )
    if meta.size and meta.bm25 and not (folder / BM25_FOLDER / bm25.COUNTS).exists():
        raise ValueError(f"the index at {folder} is of an earlier version, which kept scores; {ANEW}")
    if meta.size and meta.bm25 and not bm25.follows_rule(folder / BM25_FOLDER):
        raise ValueError(
            f"the index at {folder} cuts words of scripts without blanks, or with combining vowels, by another rule "
            f"than queries are cut now; {ANEW}"
        )
    return Index(_ranker(meta, folder), Passages(folder / PASSAGES))


def describe(folder: Path) -> Health:
    """Kind, hashes and size of the index in a folder; a remote index has the hash that its server gave.

    Reads all files once, and raises ValueError for one that is not as it was built. An index without SUMS, of an
    earlier version, is taken as it is.
    """
    meta = _read_meta(folder)
    folder_hash = sha256(folder)
    if not (folder / SUMS).exists():
        logger.warning("the index at %s has no %s: damage may go unnoticed; %s", folder, SUMS, ANEW)
    index_hash = meta.served_hash or meta.known_as or folder_hash
    return Health(kind=meta.kind, index_hash=index_hash, passages_hash=meta.passages_hash, size=meta.size)


def _meta(params: SearchParams, size: int, passages_hash: str, *, encoder: str = "", served: str = "") -> Meta:
    return Meta(
        kind=params.kind,
        size=size,
        passages_hash=passages_hash,
        bm25=params.bm25 if params.kind in ("bm25", "hybrid") else None,
        dense=params.dense if params.kind in ("dense", "hybrid") else None,
        hybrid=params.hybrid if params.kind == "hybrid" else None,
        encoder_hash=encoder,
        served_hash=served,
    )


def _read_meta(folder: Path) -> Meta:
    if not (folder / META).exists():
        raise FileNotFoundError(f"there is no index at {folder}; {_REMEDY}")
    try:
        return Meta.model_validate_json((folder / META).read_text())
    except ValueError as fault:
        raise ValueError(f"{folder / META} is damaged, or of another version of the project; {_REMEDY}") from fault


def _build_local(params: SearchParams, passages: Path, folder: Path, target: Path) -> Meta:
    """Builds in `folder` what will be `target`, beside which lies what a build that is ended goes on from."""
    encoder = model_hash(params.dense.encoder) if params.kind in ("dense", "hybrid") else ""
    meta = _meta(params, store(passages, folder / PASSAGES), sha256(passages), encoder=encoder)
    if not meta.size:  # worlds are not searched
        return meta
    if meta.bm25:
        bm25.build(passages, folder / BM25_FOLDER, meta.bm25, _beside(target, "words"))
    if meta.dense:
        from agent_r1.search import dense

        held = target / DENSE_FOLDER if _holds_vectors_of(meta, target) else None
        dense.build(passages, folder / DENSE_FOLDER, meta.dense, _beside(target, "vectors"), held)
    return meta


def _seal(folder: Path, meta: Meta) -> None:
    (folder / META).write_text(meta.model_dump_json(indent=2) + "\n")
    write_sums(folder)


def _name_of_alike(meta: Meta, folder: Path) -> str:
    """The hash of the index in a folder if it ranks as one of `meta` does, so that runs with it go on; else ""."""
    with suppress(FileNotFoundError, ValueError):
        if not _read_meta(folder).is_built_as(meta):
            return ""
        words_differ = meta.size and meta.bm25 and not bm25.follows_rule(folder / BM25_FOLDER)
        return "" if words_differ else describe(folder).index_hash
    return ""


def _beside(folder: Path, name: str) -> Path:
    return folder.with_name(f".{folder.name}.{name}")


def _holds_vectors_of(meta: Meta, folder: Path) -> bool:
    """Whether there is a whole index in a folder that holds the vectors of another one."""
    with suppress(FileNotFoundError, ValueError):
        earlier = _read_meta(folder)
        if earlier.dense and earlier.dense.exact and _vectors_of(earlier) == _vectors_of(meta):
            describe(folder)  # refuses a damaged one
            return True
    return False


def _vectors_of(meta: Meta) -> Sequence[object]:
    """All that decides the vectors of an index."""
    names = {"passage_prefix", "pooling", "max_tokens", "vectors"}
    settings = meta.dense.model_dump(include=names) if meta.dense else {}
    return meta.passages_hash, meta.encoder_hash, settings


def _ranker(meta: Meta, folder: Path) -> Ranker:
    if not meta.size:
        return Hybrid([], HybridParams(candidates=1))  # ranks nothing
    rankers: list[Ranker] = []
    if meta.bm25:
        rankers.append(BM25(folder / BM25_FOLDER, meta.size, meta.bm25))
    if meta.dense:
        from agent_r1.search.dense import Dense

        rankers.append(Dense(folder / DENSE_FOLDER, meta.dense, meta.size))
    return Hybrid(rankers, meta.hybrid) if meta.hybrid else rankers[0]


def _refuse_other_passages(index: str, passages_hash: str, passages: Path, remedy: str) -> None:
    """Refuses an index of other passages; one that does not say of which it is, Search-R1's, is taken."""
    if not passages_hash:
        return
    file_hash = sha256(passages)
    if passages_hash != file_hash:
        for _ in read_batches(passages):  # refuses it by its own sums if it is damaged
            pass
        raise ValueError(
            f"{index} was built from other passages ({passages_hash[:12]}) than {passages} ({file_hash[:12]}); {remedy}"
        )
