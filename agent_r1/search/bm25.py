"""BM25 over titles and texts: ranks from the score columns that `agent_r1.search.postings` keeps on disk."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from agent_r1.search import postings
from agent_r1.search.base import Positions, Ranker
from agent_r1.search.words import words

Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Column:
    """The passages that contain a word of the query, and what each gets for it."""

    passages: NDArray[np.int32]  # ascending
    scores: Scores  # of the word, once
    times: int  # the word stands in the query
    bound: float  # the most that a passage gets for the word, `times` counted

    def at(self, passages: NDArray[np.int32]) -> Scores:
        """The score of each of some passages, 0 where the word is not."""
        if not len(self.passages):
            return np.zeros(len(passages), np.float32)
        places = np.searchsorted(self.passages, passages).clip(max=len(self.passages) - 1)
        return np.where(self.passages[places] == passages, self.scores[places], np.float32(0))


class BM25(Ranker):
    """A memory-mapped index: memory holds a number per passage and the pages of the columns that are asked for."""

    def __init__(self, folder: Path, passages: int) -> None:
        """Opens what `postings.build` wrote about so many passages."""
        self._size = passages
        self._vocabulary = pa.ipc.open_file(pa.memory_map(str(folder / postings.VOCABULARY))).get_batch(0)["word"]
        self._starts, self._passages, self._scores, self._bounds = (
            np.asarray(np.load(folder / name, mmap_mode="r"))
            for name in (postings.STARTS, postings.PASSAGES, postings.SCORES, postings.BOUNDS)
        )

    def rank(self, query: str, k: int) -> Positions:
        """Positions of the best passages, best first; those that share no word with the query are left out."""
        asked = words(query)
        columns = {word: column for word, times in Counter(asked).items() if (column := self._column(word, times))}
        if not columns:
            return np.empty(0, np.int64)
        candidates = _candidates(list(columns.values()), self._size, k)
        scores = np.zeros(len(candidates), np.float32)
        for word in asked:  # in the query's order: a sum of floats depends on it
            if word in columns:
                scores += columns[word].at(candidates)
        return candidates[np.argsort(-scores, kind="stable")][:k].astype(np.int64)

    def _column(self, word: str, times: int) -> _Column | None:
        place = bisect_left(self._vocabulary, word, key=_text)
        if place == len(self._vocabulary) or self._vocabulary[place].as_py() != word:
            return None
        span = slice(int(self._starts[place]), int(self._starts[place + 1]))
        return _Column(self._passages[span], self._scores[span], times, times * float(self._bounds[place]))


def _text(word: pa.StringScalar) -> str:
    return str(word.as_py())


def _candidates(columns: Sequence[_Column], size: int, k: int) -> NDArray[np.int32]:
    """Passages, ascending, that hold the best `k` and everything that equals the last of them.

    Adds the columns up from the rarest word on, until what the remaining ones could give to a passage that was not
    met is less than the k-th best has already (MaxScore: Turtle and Flood 1995). The long columns of common words are
    then only looked up for the few passages that may still get far enough.
    """
    columns = sorted(columns, key=lambda column: len(column.passages))
    bounds = np.array([column.bound for column in columns])
    rest = np.append(np.cumsum(bounds[::-1])[::-1], 0.0)  # [columns + 1] what columns i and later can give
    slack = rest[0] * sum(column.times for column in columns) * np.finfo(np.float32).eps  # of sums in another order
    sums = np.zeros(size, np.float32)
    least, added = 0.0, 0
    while added < len(columns) and rest[added] + slack >= least:
        column, added = columns[added], added + 1
        reached = sums[column.passages] + np.float32(column.times) * column.scores
        sums[column.passages] = reached
        least = max(least, _kth_best(column.passages, reached, columns[added:], k))
    found = _met(columns[:added], sums, least - rest[added] - slack)
    reached = sums[found]
    for i in range(added, len(columns)):
        reached += np.float32(columns[i].times) * columns[i].at(found)
        least = max(least, _kth_largest(reached, k))
        stays = reached + rest[i + 1] + slack >= least
        found, reached = found[stays], reached[stays]
    return found


def _kth_best(passages: NDArray[np.int32], reached: Scores, columns: Sequence[_Column], k: int) -> float:
    """The smallest of the full scores of the `k` passages that have reached most, once the other columns are added."""
    if len(passages) < k:
        return 0.0
    leading = np.argpartition(reached, -k)[-k:]
    scores = reached[leading]
    for column in columns:
        scores += np.float32(column.times) * column.at(passages[leading])
    return float(scores.min())


def _met(columns: Sequence[_Column], sums: Scores, least: float) -> NDArray[np.int32]:
    """The passages of some columns whose sums are at least so large, ascending, each once."""
    met = np.sort(np.concatenate([column.passages[sums[column.passages] >= least] for column in columns]))
    return met[np.diff(met, prepend=-1) > 0]


def _kth_largest(scores: Scores, k: int) -> float:
    """0 where there are fewer: every score is larger."""
    return float(np.partition(scores, -k)[-k]) if len(scores) >= k else 0.0
