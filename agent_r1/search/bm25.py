"""BM25 over titles and texts, kept on disk.

The index is built by `bm25s`: an established library that scores every (word, passage) pair once, at indexing
time, into a sparse matrix (Lù 2024, arXiv 2407.03618). A query is then a sum of a few columns, fast without a
server or a Java runtime, and the saved matrix is plain numpy files that are memory-mapped when loaded.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import bm25s
import numpy as np
from numpy.typing import NDArray

from agent_r1.records import Passage
from agent_r1.search.base import Search
from agent_r1.tables import read_rows, write_rows

logging.getLogger("bm25s").setLevel(logging.INFO)  # the library sets DEBUG for itself when imported

_WORD = re.compile(r"\w+")
_PASSAGES = "passages.parquet"


def words(text: str) -> list[str]:
    """The words that are matched: lower case, no accents, no plural s. Stop words stay: BM25 weighs them low.

    On HotpotQA folding accents and plurals each find more gold passages; leaving out stop words finds fewer.
    """
    letters = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return [_singular(word) for word in _WORD.findall(letters.lower())]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def build(passages: Sequence[Passage], directory: Path, *, k1: float, b: float) -> None:
    """Writes an index of the passages to `directory`, whole or not at all; an older one there is replaced.

    The same passages give the same bytes.

    Args:
        k1: how soon repetitions of a word stop counting.
        b: how much long passages are held back, 0 to 1.

    Raises:
        ValueError: there is not a single word to index.
    """
    vocabulary: dict[str, int] = {}  # by first appearance; bm25s' own order changes from process to process
    documents = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in words(f"{passage.title}\n{passage.text}")]
        for passage in passages
    ]
    if not vocabulary:
        raise ValueError(f"{len(passages)} passages without a single word: nothing to index; check the data set")
    index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
    index.index((documents, vocabulary), show_progress=False)
    unfinished = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    try:
        index.save(unfinished, show_progress=False)
        write_rows(unfinished / _PASSAGES, passages, Passage)
        move_into_place(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def move_into_place(new: Path, place: Path) -> None:
    """Renames a finished file or folder to `place`; what was there is gone."""
    if place.is_dir():
        shutil.rmtree(place)
    new.replace(place)


class BM25(Search):
    """A loaded index. Equal scores rank by the order of the passages, so a search has one result everywhere."""

    def __init__(self, index: Any, passages: Sequence[Passage]) -> None:
        self._index = index
        self._passages = passages

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Opens an index that `build` wrote; its score matrix stays on disk, memory-mapped.

        Raises:
            FileNotFoundError: there is no index in `directory`.
        """
        if not directory.is_dir():
            raise FileNotFoundError(f"there is no index at {directory}; run the prepare stage (`dvc repro prepare`)")
        passages = read_rows(directory / _PASSAGES, Passage)
        return cls(bm25s.BM25.load(directory, mmap=True, show_progress=False), passages)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For each query its best passages, best first; passages that share no word with it are left out."""
        return [[self._passages[i] for i in self._best(words(query), k)] for query in queries]

    def _best(self, query: list[str], k: int) -> NDArray[np.intp]:
        known = [word for word in query if word in self._index.vocab_dict]
        if not known:
            return np.empty(0, dtype=np.intp)
        return _top(self._index.get_scores(known), k)


def _top(scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Indices of the `k` largest positive scores, largest first, equal ones in their order."""
    candidates = np.flatnonzero(scores > 0)
    if len(candidates) > k:
        least = np.partition(scores[candidates], -k)[-k]
        candidates = candidates[scores[candidates] >= least]
    return candidates[np.argsort(-scores[candidates], kind="stable")][:k]
