"""Indexes on a failing disk: a bit of a file flipped, a file cut short or gone; and FAISS's files by others."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import faiss
import numpy as np

from agent_r1.params import SHIPPED, load
from agent_r1.params.search import SearchParams
from agent_r1.records import Passage
from agent_r1.search.index import build, open_index
from agent_r1.search.prebuilt import UNIT, Prebuilt
from agent_r1.tables import write_rows
from benchmarks.hostile.kind import Kind, require
from benchmarks.hostile.mutations import damaged
from tests.fixtures import make_encoder

_QUERIES = ["river", "who made kiss", "city number 7", "mara film country"]
_COUNT = 300  # passages
_NOUNS = ("river", "film", "city", "country", "Mara", "Kiss")


class IndexFiles(Kind):
    """An index finds what it found when it was built, or is refused by the name of a file."""

    name, tried, refusals = "index files", 400, (ValueError, FileNotFoundError)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._params = self._settings()
        self._passages = _write_passages(folder)
        build(self._params, self._passages, folder / "honest")
        self._expected = self._results(folder / "honest")

    def _settings(self) -> SearchParams:
        return load(SHIPPED).search

    def make(self, rng: Random) -> Path:
        shutil.rmtree(self.folder / "index", ignore_errors=True)
        shutil.copytree(self.folder / "honest", self.folder / "index")
        file = rng.choice(sorted(path for path in (self.folder / "index").rglob("*") if path.is_file()))
        content = bytearray(file.read_bytes())
        place = rng.randrange(len(content))
        content[place] ^= 1 << rng.randrange(8)
        match rng.randrange(20):
            case 0:
                file.unlink()
            case 1:
                file.write_bytes(content[:place])
            case _:
                file.write_bytes(content)
        return self.folder / "index"

    def judge(self, made: Path) -> None:
        require(self._results(made) == self._expected, "other passages than the index was built for")

    def names(self, made: Path) -> tuple[str, ...]:
        return (str(made),)

    def _results(self, folder: Path) -> list[list[Passage]]:
        return open_index(self._params, self._passages, folder).search(_QUERIES, 5)


class DenseFiles(IndexFiles):
    """The same of FAISS's files."""

    name, tried = "dense index files", 200

    def _settings(self) -> SearchParams:
        own = super()._settings()
        changes = {"encoder": str(make_encoder(self.folder / "encoder")), "max_tokens": 32, "faiss": "sq8"}
        return own.model_copy(update={"kind": "dense", "dense": own.dense.model_copy(update=changes)})


class Prebuilts(Kind):
    """A flat index of others gives a vector of length 1 for each passage, or is refused by its name."""

    name, tried = "faiss by others", 400
    refusals = (ValueError, FileNotFoundError)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._passages = _write_passages(folder)
        vectors = np.random.default_rng(0).standard_normal((_COUNT, 16), np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        self._honest = []
        for form in ("Flat", "SQ8", "IDMap,Flat", "HNSW8", "IVF4,Flat"):
            index = faiss.index_factory(16, form, faiss.METRIC_INNER_PRODUCT)
            index.train(vectors)
            index.add_with_ids(vectors, np.arange(_COUNT)) if "IDMap" in form else index.add(vectors)
            self._honest.append(bytes(faiss.serialize_index(index)))

    def make(self, rng: Random) -> Path:
        content = bytearray(rng.choice((*self._honest[:1] * 3, *self._honest)))
        match rng.randrange(4):
            case 0:
                content = bytearray(damaged(bytes(content), rng))
            case 1:  # a number of the header
                place = rng.choice((0, 4, 8, 33, 37))
                content[place : place + 8] = rng.choice((0, 1, 16, 301, 2**31, 2**62, 2**64 - 1)).to_bytes(8, "little")
            case 2:
                content += bytes(rng.choice((1, 64, 5000)))
        path = self.folder / "e5_Flat.index"
        path.write_bytes(content)
        return path

    def judge(self, made: Path) -> None:
        vectors = np.concatenate([*Prebuilt(made, self._passages, 16).shards(64)])
        lengths = np.linalg.norm(vectors, axis=1)
        require(len(vectors) == _COUNT and bool((abs(lengths - 1) <= UNIT).all()), "other vectors than an index has")

    def names(self, made: Path) -> tuple[str, ...]:
        return (str(made),)


def _write_passages(folder: Path) -> Path:
    texts = (f"A {_NOUNS[at % 6]} of {_NOUNS[at * 7 % 5]}, number {at}." for at in range(_COUNT))
    rows = [Passage(passage_id=str(at), title=f"Title {at}", text=text) for at, text in enumerate(texts)]
    write_rows(folder / "passages.parquet", rows, Passage)
    return folder / "passages.parquet"
