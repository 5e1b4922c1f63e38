"""BM25: scores of every (word, passage) pair, computed once, kept on disk word by word, and ranked."""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from tqdm import tqdm

from agent_r1.files import remove_folder, replacing, sha256
from agent_r1.letters import ALL, LETTER, MARKS, UNSPACED
from agent_r1.params.search import BM25Params
from agent_r1.records import Floats, Floats32, Int32s, Int64s
from agent_r1.search.base import Positions, Ranker, full_texts, open_arrow, read_batches, workplace
from agent_r1.tables import open_rows

_WORD = re.compile(rf"[\w{MARKS}]+")
_FOREIGN = re.compile(r"[^\x00-\x7f]+")
_LETTER = re.compile(LETTER)
_RUN = re.compile(rf"(?:{LETTER})+|[^{UNSPACED}]+")
RUN = 1 << 14  # passages that are counted at a time
FEW = 1 << 13  # passages: of so many all are scored
WINDOW = 1 << 13  # passages whose sums fit the nearest caches
PART = 1 << 23  # pairs of a word and a passage that are merged at a time, at 30 bytes
RULE = "words-2"  # the version of `raw_words`: an empty file, where there are words that the first cuts otherwise
VOCABULARY = "vocabulary.arrow"  # [V] words, sorted
STARTS = "starts.npy"  # [V + 1] int64, where each word's column begins
PASSAGES = "passages.npy"  # [P] int32, positions of passages, ascending in each column
COUNTS = "counts.npy"  # [P] uint8, or wider where one needs it: how often the word stands in the passage
LENGTHS = "lengths.npy"  # [N] uint8 or wider, words of each passage
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
    text = _FOREIGN.sub(_letters, unicodedata.normalize("NFKD", text))
    plain = _WORD.findall(text.lower())
    if not _LETTER.search(text):
        return plain
    return [part for word in plain for run in _RUN.findall(word) for part in _pairs(run)]


def _letters(characters: re.Match[str]) -> str:
    return "".join(c for c in characters[0] if not unicodedata.combining(c) or c in MARKS)


def _pairs(run: str) -> Iterable[str]:
    letters = _LETTER.findall(run)
    return map("".join, pairwise(letters)) if len(letters) > 1 else [run]


def singular(word: str) -> str:
    """The word without a plural s; short words and words in -ss stay."""
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def build(source: Path, folder: Path, params: BM25Params, cache: Path) -> None:
    """Writes the columns of a Parquet file of passages to a new folder; goes on from what folder `cache` holds."""
    place = workplace(cache, sha256(source), RULE, RUN)
    with open_rows(source) as file:
        size = file.metadata.num_rows
    with tqdm(total=size, desc="indexing", unit="passage", disable=None) as progress:  # None: on a terminal only
        for count in _write_runs(source, place):
            progress.update(count)
    paths = sorted(place.glob("[0-9]*.arrow"))
    vocabulary, frequencies, lengths = _count_words(paths, size)
    if not vocabulary:
        raise ValueError(f"{size} passages without a single word: nothing to index; check the data set")
    folder.mkdir(parents=True)
    _write_batch(folder / VOCABULARY, word=pa.array(vocabulary, pa.large_string()))
    if _is_cut_otherwise(folder):
        (folder / RULE).touch()
    np.save(folder / LENGTHS, lengths)
    np.save(folder / STARTS, np.concatenate([[0], np.cumsum(frequencies)]))
    _write_columns(folder, paths, vocabulary, params)
    remove_folder(cache)


def follows_rule(folder: Path) -> bool:
    """Whether the words of an index were cut as those of queries are now."""
    return _is_cut_otherwise(folder) == (folder / RULE).exists()


def _is_cut_otherwise(folder: Path) -> bool:
    return bool(pc.any(pc.match_substring_regex(_read_vocabulary(folder), f"[{ALL}]")).as_py())


def _read_vocabulary(folder: Path) -> pa.Array[Any]:
    return open_arrow(folder / VOCABULARY).column("word").chunks[0]


def _write_runs(source: Path, place: Path) -> Iterator[int]:
    """Writes a file of the words of every `RUN` passages, but for those that are there; gives how many they are."""
    first = 0
    for number, batch in enumerate(read_batches(source, RUN)):
        path = place / f"{number:08d}.arrow"
        if not path.exists():
            columns = _columns(full_texts(batch, "\n"), first)
            with replacing(path) as temporary:
                _write_batch(temporary, **columns)
        first += batch.num_rows
        yield batch.num_rows


def _columns(texts: Sequence[str], first: int) -> dict[str, pa.Array[Any]]:
    """The words of some texts, sorted, and for each the texts that have it, from position `first` on, and how often."""
    parts = [raw_words(text) for text in texts]
    vocabulary, ranks = _ranked(chain.from_iterable(parts))
    numbers = np.repeat(np.arange(len(texts)), [len(part) for part in parts])  # of the text of each word
    pairs, counts = np.unique(ranks << 32 | numbers, return_counts=True)
    starts = pa.array(np.searchsorted(pairs >> 32, np.arange(len(vocabulary) + 1)), pa.int64())
    passages = (first + (pairs & 0xFFFFFFFF)).astype(np.int32)
    return {
        "word": pa.array(vocabulary, pa.large_string()),
        "passages": pa.LargeListArray.from_arrays(starts, pa.array(passages)),
        "counts": pa.LargeListArray.from_arrays(starts, pa.array(_smallest(counts))),
    }


def _ranked(raw: Iterable[str]) -> tuple[list[str], Int64s]:
    """The words that stand there, in the singular and sorted, and the place among them of each that stands there."""
    encoded: Any = pa.array(raw, pa.large_string()).dictionary_encode()
    singulars = [singular(word) for word in encoded.dictionary.to_pylist()]
    vocabulary = sorted(set(singulars))
    ranks = {word: rank for rank, word in enumerate(vocabulary)}
    return vocabulary, np.array([ranks[word] for word in singulars], np.int64)[encoded.indices.to_numpy()]


def _smallest(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.min_scalar_type(values.max(initial=0)))


def _write_batch(path: Path, **columns: pa.Array[Any]) -> None:
    batch = pa.record_batch(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


class _Run:
    """The words of some passages in a file of `_write_runs`, mapped: in memory only while they are read."""

    def __init__(self, path: Path) -> None:
        columns: Any = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0).columns
        self.words, passages, counts = columns
        self.starts = passages.offsets.to_numpy()  # [V' + 1]
        self.passages = passages.values.to_numpy()  # [P'] by word, then by position
        self.counts = counts.values.to_numpy()  # [P'] occurrences of the word in the passage


def _count_words(paths: Sequence[Path], size: int) -> tuple[list[str], Int64s, NDArray[Any]]:
    """All words, sorted, the number of passages that have each, and the words of each of `size` passages."""
    frequencies: dict[str, int] = {}
    lengths = np.zeros(size, np.int64)
    for run in map(_Run, paths):
        for word, frequency in zip(run.words.to_pylist(), np.diff(run.starts).tolist(), strict=True):
            frequencies[word] = frequencies.get(word, 0) + frequency
        np.add.at(lengths, run.passages, run.counts)
    vocabulary = sorted(frequencies)
    return vocabulary, np.array([frequencies[word] for word in vocabulary], np.int64), _smallest(lengths)


def _write_columns(folder: Path, paths: Sequence[Path], vocabulary: Sequence[str], params: BM25Params) -> None:
    """Writes the columns of all words, and the largest score of each."""
    lengths = np.load(folder / LENGTHS)
    starts = np.load(folder / STARTS)
    rarities = _rarities(np.diff(starts), len(lengths))
    saturations = _saturations(lengths, params)
    bounds = list[Floats32]()
    for part, passages, counts in _merged(folder, paths, vocabulary, starts):
        ends = starts[part.start : part.stop + 1]
        scores = _scores(np.repeat(rarities[part], np.diff(ends)), counts, saturations[lengths[passages]])
        bounds.append(np.maximum.reduceat(scores, ends[:-1] - ends[0]))
    np.save(folder / BOUNDS, np.concatenate(bounds))


def _merged(
    folder: Path, paths: Sequence[Path], vocabulary: Sequence[str], starts: Int64s
) -> Iterator[tuple[slice, Int32s, NDArray[Any]]]:
    """Merges the runs in order, so that columns stay sorted: the words of some `PART` pairs, written and given."""
    kind = np.result_type(*(run.counts.dtype for run in map(_Run, paths)))
    for name, dtype in ((PASSAGES, np.int32), (COUNTS, kind)):
        open_memmap(folder / name, "w+", dtype, (int(starts[-1]),))  # type: ignore[no-untyped-call]
    for part in _parts(starts):
        ends = starts[part.start : part.stop + 1]
        passages = np.empty(int(ends[-1] - ends[0]), np.int32)
        counts = np.empty(len(passages), kind)
        _merge(paths, vocabulary[part], ends[:-1] - ends[0], passages, counts)
        for name, column in ((PASSAGES, passages), (COUNTS, counts)):
            np.load(folder / name, mmap_mode="r+")[int(ends[0]) : int(ends[-1])] = column
        yield part, passages, counts


def _parts(starts: Int64s) -> Iterator[slice]:
    """Neighbouring words, at least one, that have some `PART` pairs together; `starts` [V + 1]."""
    first = 0
    while first + 1 < len(starts):
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + PART, "right")) - 1)
        yield slice(first, last)
        first = last


def _merge(paths: Sequence[Path], words: Sequence[str], heads: Int64s, passages: Int32s, counts: NDArray[Any]) -> None:
    """Writes the columns of some neighbouring words into two arrays, from `heads` [words] on, which move on."""
    places = {word: place for place, word in enumerate(words)}
    for run in map(_Run, paths):
        first = bisect_left(run.words, words[0], key=str)
        last = bisect_right(run.words, words[-1], key=str)
        columns = np.array([places[word] for word in run.words[first:last].to_pylist()], np.int64)
        starts = run.starts[first : last + 1]
        frequencies = np.diff(starts)
        pairs = slice(starts[0], starts[-1])
        targets = np.repeat(heads[columns] - starts[:-1], frequencies) + np.arange(starts[0], starts[-1])
        passages[targets] = run.passages[pairs]
        counts[targets] = run.counts[pairs]
        heads[columns] += frequencies


def _scores(rarities: Floats32 | np.float32, counts: NDArray[Any], saturations: Floats) -> Floats32:
    scores: Floats32 = (rarities * (counts / (saturations + counts))).astype(np.float32)
    return scores


def _saturations(lengths: NDArray[Any], params: BM25Params) -> Floats:
    """[longest + 1] by the words of a passage, what its counts are held against."""
    weighed: Floats = params.b * np.arange(lengths.max() + 1) / lengths.mean()
    return params.k1 * ((1 - params.b) + weighed)


def _rarities(frequencies: Int64s, passages: int) -> Floats32:
    """[V] Lucene's inverse document frequency of words by how many of the passages have them."""
    return np.array([math.log(1 + (passages - n + 0.5) / (n + 0.5)) for n in frequencies.tolist()], np.float32)


class BM25(Ranker):
    """A memory-mapped index: memory holds the pages of the columns in use."""

    def __init__(self, folder: Path, passages: int, params: BM25Params) -> None:
        """Opens a folder that `build` wrote for `passages` passages."""
        self._size = passages
        self._vocabulary = _read_vocabulary(folder)
        self._starts, self._passages, self._counts, self._lengths, self._bounds = (
            np.asarray(np.load(folder / name, mmap_mode="r")) for name in (STARTS, PASSAGES, COUNTS, LENGTHS, BOUNDS)
        )
        self._saturations = _saturations(self._lengths, params)

    def rank(self, query: str, k: int) -> Positions:
        """Positions of the best passages, best first, without passages that share no word with the query."""
        places = [place for place in map(self._place, words(query)) if place is not None]  # in the query's order
        if not places:
            return np.empty(0, np.int64)
        return self._rank_all(places, k) if self._size <= FEW else self._rank_many(places, k)

    def _rank_all(self, places: Sequence[int], k: int) -> Positions:
        """Scores every passage: the definition, and for few passages sooner done than `windows` is loaded."""
        scores = np.zeros(self._size, np.float32)
        for place in places:
            pairs = slice(self._starts[place], self._starts[place + 1])
            passages = self._passages[pairs]
            [rarity] = _rarities(np.diff(self._starts[place : place + 2]), self._size)
            scores[passages] += _scores(rarity, self._counts[pairs], self._saturations[self._lengths[passages]])
        best = np.argsort(-scores, kind="stable")[:k]
        return best[scores[best] > 0]

    def _rank_many(self, places: Sequence[int], k: int) -> Positions:
        from agent_r1.search.windows import Columns, Terms, best  # and with it numba, which takes a while

        terms = np.array(places)
        ascending = np.argsort(self._bounds[terms], kind="stable")
        terms = terms[ascending]
        starts = self._starts[terms]
        ends = self._starts[terms + 1]
        columns = Columns(self._passages, self._counts, self._lengths, self._saturations)
        query = Terms(starts, starts.copy(), ends, _rarities(ends - starts, self._size), self._bounds[terms])
        return best(columns, query, np.argsort(ascending), k, WINDOW)

    def _place(self, word: str) -> int | None:
        place = bisect_left(self._vocabulary, word, key=str)
        is_known = place < len(self._vocabulary) and str(self._vocabulary[place]) == word
        return place if is_known else None
