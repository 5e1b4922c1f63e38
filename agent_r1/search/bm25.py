"""BM25: scores of every (word, passage) pair, computed once, kept on disk word by word, and ranked."""

from __future__ import annotations

import math
import re
import tempfile
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from tqdm import tqdm

from agent_r1.letters import ALL, LETTER, MARKS, UNSPACED
from agent_r1.params.stages import BM25Params
from agent_r1.search.base import Positions, Ranker, full_texts, read_batches
from agent_r1.tables import open_rows

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Int64s = NDArray[np.int64]
_WORD = re.compile(rf"[\w{MARKS}]+")
_LETTER = re.compile(LETTER)
_RUN = re.compile(rf"(?:{LETTER})+|[^{UNSPACED}]+")
RUN = 4096  # passages that are counted at a time
RULE = "words-2"  # the version of `raw_words`: an empty file, where there are words that the first cuts otherwise
VOCABULARY = "vocabulary.arrow"  # [V] words, sorted
STARTS = "starts.npy"  # [V + 1] int64, where each word's column begins
PASSAGES = "passages.npy"  # [P] int32, positions of passages, ascending in each column
SCORES = "scores.npy"  # [P] float32
BOUNDS = "bounds.npy"  # [V] float32, the largest score of each column


def words(text: str) -> list[str]:
    """The words of a text, in lower case, without accents and plural s. Stop words stay: BM25 weighs them low.

    On HotpotQA, folding accents and folding plurals each find more gold passages; leaving out stop words finds fewer.
    """
    return [singular(word) for word in raw_words(text)]


def raw_words(text: str) -> list[str]:
    """The words of a text, in lower case and without accents, but with their plural s.

    Where a script writes no blanks, every two neighbouring letters are a word, and a lone one is.
    """
    if text.isascii():
        return _WORD.findall(text.lower())
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c) or c in MARKS)
    plain = _WORD.findall(text.lower())
    if not _LETTER.search(text):
        return plain
    return [part for word in plain for run in _RUN.findall(word) for part in _pairs(run)]


def _pairs(run: str) -> Iterable[str]:
    letters = _LETTER.findall(run)
    return map("".join, pairwise(letters)) if len(letters) > 1 else [run]


def singular(word: str) -> str:
    """The word without a plural s; short words and words in -ss stay."""
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def build(source: Path, folder: Path, params: BM25Params) -> None:
    """Writes the score columns of a Parquet file of passages to a new folder."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix=".runs.", dir=folder) as runs:
        vocabulary, lengths, paths = _write_runs(source, Path(runs))
        if not vocabulary:
            raise ValueError(f"{len(lengths)} passages without a single word: nothing to index; check the data set")
        ranks = _write_vocabulary(folder / VOCABULARY, vocabulary)
        if _is_cut_otherwise(folder):
            (folder / RULE).touch()
        del vocabulary
        _write_columns(folder, paths, ranks, lengths, params)


def follows_rule(folder: Path) -> bool:
    """Whether the words of an index were cut as those of queries are now."""
    return _is_cut_otherwise(folder) == (folder / RULE).exists()


def _is_cut_otherwise(folder: Path) -> bool:
    return bool(pc.any(pc.match_substring_regex(_read_vocabulary(folder), f"[{ALL}]")).as_py())


def _read_vocabulary(folder: Path) -> pa.Array[Any]:
    return pa.ipc.open_file(pa.memory_map(str(folder / VOCABULARY))).get_batch(0)["word"]


def _write_runs(source: Path, folder: Path) -> tuple[dict[str, int], Int64s, list[Path]]:
    """The id of each word, the length of each passage in words, and a file of the pairs of each batch."""
    ids: dict[str, int] = {}  # by first appearance; a word and its plural are one
    raw_ids: dict[str, int] = {}
    lengths: list[Int64s] = [np.empty(0, np.int64)]
    paths = list[Path]()
    with open_rows(source) as file:
        count = file.metadata.num_rows
    with tqdm(total=count, desc="indexing", unit="passage", disable=None) as progress:  # None: on a terminal only
        for batch in read_batches(source, RUN):
            word_ids, ends = _number_words(full_texts(batch, "\n"), ids, raw_ids)
            first = sum(map(len, lengths))
            paths.append(folder / f"{len(paths)}.npz")
            lengths.append(np.diff(ends))
            _write_run(paths[-1], np.array(word_ids, np.int64), first, lengths[-1])
            progress.update(batch.num_rows)
    return ids, np.concatenate(lengths), paths


def _number_words(texts: list[str], ids: dict[str, int], raw_ids: dict[str, int]) -> tuple[list[int], list[int]]:
    """The id of each word of the texts, new words added to both mappings, and where in that list each text ends."""
    word_ids: list[int] = []
    ends = [0]
    for text in texts:
        for word in raw_words(text):
            if word not in raw_ids:
                raw_ids[word] = ids.setdefault(singular(word), len(ids))
            word_ids.append(raw_ids[word])
        ends.append(len(word_ids))
    return word_ids, ends


def _write_run(path: Path, words: Int64s, first: int, lengths: Int64s) -> None:
    """Writes the pairs of passages from `first` on, of so many words each, by word and then by passage."""
    passages = np.repeat(np.arange(first, first + len(lengths)), lengths)
    pairs, counts = np.unique(words << 32 | passages, return_counts=True)
    words, frequencies = np.unique(pairs >> 32, return_counts=True)
    columns = (words, frequencies, pairs & 0xFFFFFFFF, counts)
    np.savez(path, *(column.astype(np.min_scalar_type(column.max(initial=0))) for column in columns))


class _Run(NamedTuple):
    """The pairs of one batch, by word and then by passage."""

    words: NDArray[Any]  # [V'] ids
    frequencies: NDArray[Any]  # [V'] passages of each word
    passages: NDArray[Any]  # [P'] positions
    counts: NDArray[Any]  # [P'] occurrences of the word in the passage

    def places(self, heads: Int64s) -> Int64s:
        """[P'] the place of each pair, where the pairs of each word stand in a row from `heads` [V'] on."""
        ends = np.cumsum(self.frequencies, dtype=np.int64)
        offsets = np.arange(len(self.passages)) - np.repeat(ends - self.frequencies, self.frequencies)
        places: Int64s = np.repeat(heads, self.frequencies) + offsets
        return places


def _read_runs(paths: Sequence[Path]) -> Iterator[_Run]:
    for path in paths:
        with np.load(path) as arrays:
            yield _Run(*(arrays[name] for name in arrays.files))


def _write_vocabulary(path: Path, ids: dict[str, int]) -> Int32s:
    """Writes the words, sorted, and returns each one's place by its id: [V]."""
    order = sorted(ids)
    table = pa.table({"word": pa.array(order, pa.large_string())})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    ranks = np.empty(len(order), np.int32)
    ranks[[ids[word] for word in order]] = np.arange(len(order), dtype=np.int32)
    return ranks


def _write_columns(folder: Path, paths: Sequence[Path], ranks: Int32s, lengths: Int64s, params: BM25Params) -> None:
    """Adds up the runs in order, so that columns stay sorted. `ranks` [V]: by id a word's place in the vocabulary."""
    frequencies = np.zeros(len(ranks), np.int64)
    for run in _read_runs(paths):
        frequencies[ranks[run.words]] += run.frequencies
    starts = np.concatenate([[0], np.cumsum(frequencies)])
    rarities = _rarities(frequencies, len(lengths))
    saturation = params.k1 * ((1 - params.b) + params.b * lengths / lengths.mean())  # [N]
    shape = (int(starts[-1]),)
    passages: Int32s = open_memmap(folder / PASSAGES, "w+", np.int32, shape)  # type: ignore[no-untyped-call]
    scores: Float32s = open_memmap(folder / SCORES, "w+", np.float32, shape)  # type: ignore[no-untyped-call]
    heads = starts[:-1].copy()
    for run in _read_runs(paths):
        columns = ranks[run.words]
        places = run.places(heads[columns])
        passages[places] = run.passages
        scores[places] = np.repeat(rarities[columns], run.frequencies) * (
            run.counts / (saturation[run.passages] + run.counts)
        )
        heads[columns] += run.frequencies
    np.save(folder / STARTS, starts)
    np.save(folder / BOUNDS, np.maximum.reduceat(scores, starts[:-1]))


def _rarities(frequencies: Int64s, passages: int) -> Float32s:
    """[V] Lucene's inverse document frequency of words by how many of the passages have them."""
    return np.array([math.log(1 + (passages - n + 0.5) / (n + 0.5)) for n in frequencies.tolist()], np.float32)


@dataclass(frozen=True, slots=True)
class _Column:
    """The passages, at least one, that contain a word of the query, and their scores for it."""

    passages: Int32s  # ascending
    scores: Float32s  # of the word, once
    times: int  # the word stands in the query
    bound: float  # the most that a passage gets for the word, `times` counted

    def at(self, passages: Int32s) -> Float32s:
        """The scores of some passages, 0 for passages without the word."""
        places = np.minimum(np.searchsorted(self.passages, passages), len(self.passages) - 1)
        return np.where(self.passages[places] == passages, self.scores[places], np.float32(0))


class BM25(Ranker):
    """A memory-mapped index: memory holds a number per passage, and the pages of the columns in use."""

    def __init__(self, folder: Path, passages: int) -> None:
        """Opens a folder that `build` wrote for `passages` passages."""
        self._size = passages
        self._vocabulary = _read_vocabulary(folder)
        self._starts, self._passages, self._scores, self._bounds = (
            np.asarray(np.load(folder / name, mmap_mode="r")) for name in (STARTS, PASSAGES, SCORES, BOUNDS)
        )

    def rank(self, query: str, k: int) -> Positions:
        """Positions of the best passages, best first, without passages that share no word with the query."""
        query_words = words(query)
        columns = {}
        for word, times in Counter(query_words).items():
            column = self._column(word, times)
            if column:
                columns[word] = column
        if not columns:
            return np.empty(0, np.int64)
        candidates = _candidates(list(columns.values()), self._size, k)
        scores = np.zeros(len(candidates), np.float32)
        for word in query_words:  # in the query's order: a sum of floats depends on it
            if word in columns:
                scores += columns[word].at(candidates)
        return candidates[np.argsort(-scores, kind="stable")][:k].astype(np.int64)

    def _column(self, word: str, times: int) -> _Column | None:
        place = bisect_left(self._vocabulary, word, key=str)
        if place == len(self._vocabulary) or self._vocabulary[place].as_py() != word:
            return None
        span = slice(int(self._starts[place]), int(self._starts[place + 1]))
        return _Column(self._passages[span], self._scores[span], times, times * float(self._bounds[place]))


def _candidates(columns: Sequence[_Column], size: int, k: int) -> Int32s:
    """Passages, ascending, among them the best `k` and all that equal the k-th.

    Adds the columns up from the rarest word on, until a new passage could not reach the k-th best score from the
    remaining columns alone (MaxScore: Turtle and Flood 1995). The long columns of common words are then only looked up
    for the few passages that may still reach it.
    """
    columns = sorted(columns, key=lambda column: len(column.passages))
    # [columns + 1] the most that columns i and later give
    rest = np.append(np.cumsum([column.bound for column in reversed(columns)])[::-1], 0.0)
    slack = rest[0] * sum(column.times for column in columns) * np.finfo(np.float32).eps  # of sums in another order
    sums = np.zeros(size, np.float32)
    least = 0.0
    added = 0
    while added < len(columns) and rest[added] + slack >= least:
        column = columns[added]
        added += 1
        reached = sums[column.passages] + np.float32(column.times) * column.scores
        sums[column.passages] = reached
        least = max(least, _kth_best(column.passages, reached, columns[added:], k))
    enough = least - rest[added] - slack
    # sorted, as `np.unique` is not, while other threads go on
    candidates = np.sort(
        np.concatenate([column.passages[sums[column.passages] >= enough] for column in columns[:added]])
    )
    candidates = candidates[np.diff(candidates, prepend=-1) > 0]
    reached = sums[candidates]
    for column in columns[added:]:
        reached += np.float32(column.times) * column.at(candidates)
        added += 1
        if len(reached) >= k:
            least = max(least, float(np.partition(reached, -k)[-k]))
        mask = reached + rest[added] + slack >= least
        candidates = candidates[mask]
        reached = reached[mask]
    return candidates


def _kth_best(passages: Int32s, reached: Float32s, columns: Sequence[_Column], k: int) -> float:
    """The smallest full score of the `k` passages that lead so far, with the other columns added."""
    if len(passages) < k:
        return 0.0
    leaders = np.argpartition(reached, -k)[-k:]
    scores = reached[leaders]
    for column in columns:
        scores += np.float32(column.times) * column.at(passages[leaders])
    return float(scores.min())
