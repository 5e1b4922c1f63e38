"""BM25 scores of every (word, passage) pair, computed once and kept on disk word by word.

What is not the query's business is done here: as in BM25S (Lù 2024, arXiv 2407.03618) a query is then a sum of a few
columns. Passages are read in batches, each leaves a sorted run, and the runs are dealt out to memory-mapped columns,
so that memory holds a batch and the vocabulary, whatever the number of passages.

Legend for shapes: V = words, P = pairs of a word and a passage that contains it, N = passages.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from tqdm import tqdm

from agent_r1.search.passages import full_texts, read_batches
from agent_r1.search.words import raw_words, singular

VOCABULARY, STARTS, PASSAGES, SCORES, BOUNDS = (
    "vocabulary.arrow",  # [V] words, sorted
    "starts.npy",  # [V + 1] int64, where each word's column begins
    "passages.npy",  # [P] int32, positions of passages, ascending in each column
    "scores.npy",  # [P] float32
    "bounds.npy",  # [V] float32, the largest score of each column
)


@dataclass(frozen=True, slots=True)
class _Run:
    """The pairs of one batch, by word and then by passage."""

    words: NDArray[np.int32]  # ids by first appearance
    passages: NDArray[np.int32]
    counts: NDArray[np.int32]  # occurrences of the word in the passage

    def save(self, path: Path) -> None:
        np.save(path, np.stack([self.words, self.passages, self.counts]))

    @classmethod
    def load(cls, path: Path) -> _Run:
        return cls(*np.load(path))


def build(source: Path, folder: Path, *, k1: float, b: float) -> None:
    """Writes the score columns of a Parquet file of passages to a new folder.

    Raises:
        ValueError: there is not a single word to index.
    """
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix=".runs.", dir=folder) as runs:
        vocabulary, lengths, paths = _write_runs(source, Path(runs))
        if not vocabulary:
            raise ValueError(f"{len(lengths)} passages without a single word: nothing to index; check the data set")
        order = sorted(vocabulary)
        ranks = np.empty(len(order), np.int32)
        ranks[[vocabulary[word] for word in order]] = np.arange(len(order), dtype=np.int32)
        _write_vocabulary(folder / VOCABULARY, order)
        _write_columns(folder, paths, ranks, lengths, k1, b)


def _write_runs(source: Path, folder: Path) -> tuple[dict[str, int], NDArray[np.int64], list[Path]]:
    """The words by id, the length of every passage in words, and the files of the runs."""
    ids: dict[str, int] = {}
    lengths: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    paths = []
    numbers = _Numbers(ids)
    count = pq.read_metadata(source).num_rows
    with tqdm(total=count, desc="indexing", unit="passage", disable=None) as progress:  # None: on a terminal only
        for number, batch in enumerate(read_batches(source)):
            documents = [numbers.of(text) for text in full_texts(batch, "\n")]
            first = sum(map(len, lengths))
            lengths.append(np.array([len(document) for document in documents], np.int64))
            paths.append(folder / f"{number}.npy")
            _run(documents, lengths[-1], first).save(paths[-1])
            progress.update(len(documents))
    return ids, np.concatenate(lengths), paths


class _Numbers:
    """Numbers words by first appearance; a word and its plural are one."""

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = ids
        self._raw: dict[str, int] = {}

    def of(self, text: str) -> list[int]:
        return [self._raw[word] if word in self._raw else self._new(word) for word in raw_words(text)]

    def _new(self, word: str) -> int:
        return self._raw.setdefault(word, self._ids.setdefault(singular(word), len(self._ids)))


def _run(documents: Sequence[list[int]], lengths: NDArray[np.int64], first: int) -> _Run:
    words = np.fromiter((word for document in documents for word in document), np.int64, int(lengths.sum()))
    passages = np.repeat(np.arange(first, first + len(documents)), lengths)
    pairs, counts = np.unique(words << 32 | passages, return_counts=True)
    return _Run((pairs >> 32).astype(np.int32), pairs.astype(np.int32), counts.astype(np.int32))


def _write_vocabulary(path: Path, words: list[str]) -> None:
    table = pa.table({"word": pa.array(words, pa.large_string())})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _write_columns(
    folder: Path, paths: Sequence[Path], ranks: NDArray[np.int32], lengths: NDArray[np.int64], k1: float, b: float
) -> None:
    """Deals the runs out: a column gets its share of the first run, then of the second, and so stays sorted.

    Args:
        ranks: [V] a word's place in the sorted vocabulary, by its id.
        lengths: [N] words per passage.
    """
    frequencies = sum(
        (np.bincount(ranks[run.words], minlength=len(ranks)) for run in map(_Run.load, paths)),
        np.zeros(len(ranks), np.int64),
    )
    starts = np.concatenate([[0], np.cumsum(frequencies)])
    rarities = _rarities(frequencies, len(lengths))
    saturation = k1 * ((1 - b) + b * lengths / lengths.mean())  # [N]
    pairs = int(starts[-1])
    passages: NDArray[np.int32] = open_memmap(folder / PASSAGES, "w+", np.int32, (pairs,))  # type: ignore[no-untyped-call]
    scores: NDArray[np.float32] = open_memmap(folder / SCORES, "w+", np.float32, (pairs,))  # type: ignore[no-untyped-call]
    heads = starts[:-1].copy()
    for run in map(_Run.load, paths):
        words = ranks[run.words]
        places = heads[words] + _places_in_column(words)
        passages[places] = run.passages
        scores[places] = rarities[words] * (run.counts / (saturation[run.passages] + run.counts))
        heads += np.bincount(words, minlength=len(ranks))
    np.save(folder / STARTS, starts)
    np.save(folder / BOUNDS, np.maximum.reduceat(scores, starts[:-1]))


def _rarities(frequencies: NDArray[np.int64], passages: int) -> NDArray[np.float32]:
    """[V] Lucene's inverse document frequency."""
    return np.array([math.log(1 + (passages - n + 0.5) / (n + 0.5)) for n in frequencies.tolist()], np.float32)


def _places_in_column(words: NDArray[np.int32]) -> NDArray[np.int64]:
    """For pairs that lie word by word: how many of the same word come before."""
    firsts = np.flatnonzero(np.diff(words, prepend=-1))
    return np.arange(len(words)) - np.repeat(firsts, np.diff(firsts, append=len(words)))
