"""The prepare stage: data sets, evenly mixed, become questions and passages on disk."""

from __future__ import annotations

import heapq
import logging
import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, starmap
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import numpy as np

from agent_r1.data import worlds
from agent_r1.data.formats import FORMATS
from agent_r1.data.quality import Review
from agent_r1.data.questions import generate_atlas
from agent_r1.data.sources import LONGEST_ROW, ROWS, Row, count, data_files, open_text, pieces, progress, read, suffix
from agent_r1.files import remove_folder
from agent_r1.params.prepare import BUILT_IN, FilesParams, PrepareParams
from agent_r1.params.worlds import SPLITS
from agent_r1.records import Passage, Question, of_split
from agent_r1.search.base import content_id, named_by_content, parted
from agent_r1.seeds import derive
from agent_r1.tables import open_rows, read_rows, row_writer, write_rows

logger = logging.getLogger(__name__)
T = TypeVar("T")

Portion = tuple[int, Iterable[T]]  # the items of a data set in a split, and before them how many they are

QUESTIONS = "questions.parquet"
PASSAGES = "passages.parquet"
TEXT = ".txt"
WORDS = 100  # of a passage of KILT's pages, as DPR's and wiki-18's have
HEADING = "Section::::"  # begins a heading's paragraph in KILT
LATEST = 1 << 18  # hashes that are kept apart from those that are sorted, at some hundred bytes each
_BULLET = re.compile(r"^BULLET::::-?\s*")


def prepare(params: PrepareParams, directory: Path, *, searched: bool = True) -> None:
    """Writes questions.parquet and passages.parquet to `directory`.

    On an error the earlier files stay whole, and nothing else is left behind. Raises FileNotFoundError if a data set is
    missing, and ValueError if one is malformed, cannot be generated, or has no passages where they are `searched`. One
    process at a time may prepare.
    """
    directory.mkdir(parents=True, exist_ok=True)
    staging = directory / ".unfinished"
    remove_folder(staging)  # of a process that was killed
    try:
        write(params, staging, searched)
        for name in (QUESTIONS, PASSAGES):
            (staging / name).replace(directory / name)
    finally:
        remove_folder(staging)


def write(params: PrepareParams, directory: Path, searched: bool = True) -> None:
    """Writes questions.parquet and passages.parquet, holding 16 bytes a passage and the ids of questions in memory.

    Questions stand split by split, the data sets evenly mixed in each. Where several data sets or splits have an id, it
    becomes `dataset/split/id`. Passages come from the rows, then from the generated world, then from every corpus;
    equal ones once. Raises the errors of `prepare`.
    """
    questions = directory / QUESTIONS
    passages = directory / PASSAGES
    distinct = _write_rows(params, questions, passages)
    if distinct.shared_ids:
        _qualify(questions, distinct.shared_ids)
    with open_rows(passages) as file:
        size = file.metadata.num_rows
    if searched and not size and params.asks:
        raise ValueError("there are no passages to search; check the corpus files under prepare.files")
    review = Review(questions, passages)
    for line in review.complaints():
        logger.warning(line)
    for line in review.evidence() if searched else ():
        logger.info(line)
    logger.info("prepared questions %s", {"/".join(key): count for key, count in distinct.counts.items()})


def _write_rows(params: PrepareParams, questions: Path, passages: Path) -> Distinct:
    """Writes all rows; returns what their ids and contents were held to."""
    distinct = Distinct()
    with row_writer(questions, Question) as add_question, row_writer(passages, Passage) as add_passage:
        atlas = generate_atlas(params.atlas, params.seed) if BUILT_IN in params.datasets else None
        world_questions = {
            name: worlds.draw(name, world) for name, world in params.worlds.items() if name in params.datasets
        }
        for entry in _entries(params, atlas.questions if atlas else [], world_questions):
            distinct.take_question(entry.question, entry.where)
            add_question(entry.question)
            for passage in entry.passages:
                if distinct.is_new(passage, entry.where):
                    add_passage(passage)
        for where, passage in _searchable(params, atlas.passages if atlas else []):
            if distinct.is_new(passage, where):
                add_passage(passage)
    return distinct


def _qualify(path: Path, shared_ids: Collection[str]) -> None:
    """Makes `dataset/split/id` of the ids that questions of several data sets or splits have; generated ones stay."""
    rows = [
        replace(row, question_id=f"{row.dataset}/{row.split}/{row.question_id}")
        if row.question_id in shared_ids and row.dataset != BUILT_IN
        else row
        for row in read_rows(path, Question)
    ]
    write_rows(path, rows, Question)


def _entries(
    params: PrepareParams,
    atlas_questions: Sequence[Question],
    world_questions: Mapping[str, Mapping[str, list[Question]]],
) -> Iterator[Entry]:
    for split in SPLITS:
        portions: list[Portion[Entry]] = []
        for name in params.datasets:
            if name == BUILT_IN:
                entries = [Entry(BUILT_IN, question) for question in of_split(atlas_questions, split)]
                portions.append((len(entries), entries))
            elif name in world_questions:
                entries = [Entry(name, question) for question in world_questions[name][split]]
                portions.append((len(entries), entries))
            elif split in params.files[name].splits:
                portions.append(from_files(name, params.files[name], split, params.seed))
        yield from progress(interleave(portions), f"{split} questions", sum(size for size, _ in portions))


def _searchable(params: PrepareParams, atlas_passages: Sequence[Passage]) -> Iterator[tuple[str, Passage]]:
    """The passages that do not come with a question; a corpus that several data sets name is read once."""
    yield from ((BUILT_IN, passage) for passage in atlas_passages)
    corpora = (params.files[name].corpus for name in params.datasets if name in params.files)
    for corpus in dict.fromkeys(path for path in corpora if path is not None):
        yield from progress(read_passages(corpus), f"passages of {corpus.name}")


def read_passages(location: Path) -> Iterator[tuple[str, Passage]]:
    """The passages of a file, a folder or a pattern, each with the place it was read from.

    A row has `title` and `text` (DPR), or both in `contents`, a title in quotation marks or without and below it the
    text (FlashRAG, wiki-18), and `id` where it has one; without, its content names it. A page of KILT's knowledge
    source is several passages. Of a text file every paragraph is a passage (blank lines part them), and the file's name
    the title of all.
    """
    for path in data_files(location, (*ROWS, TEXT)):
        if suffix(path) == TEXT:
            yield from _read_paragraphs(path)
            continue
        for row in read(path):
            passages = _passages_of_page(row) if row.has("wikipedia_title") else [_passage(row)]
            yield from ((str(row), passage) for passage in passages)


def _passages_of_page(row: Row) -> Iterator[Passage]:
    """`WORDS` words each of a page of KILT, without its title and headings; ids are the page's and a number from 0.

    Source: github.com/facebookresearch/KILT; the Hub's Parquet has the paragraphs one level deeper.
    """
    title = row.text("wikipedia_title")
    page = row.text("wikipedia_id", numbers=True)
    match row.fields.get("text"):
        case {"paragraph": [*paragraphs]} | [*paragraphs] if all(isinstance(part, str) for part in paragraphs):
            body = [part for part in paragraphs if part.strip() != title and not part.startswith(HEADING)]
        case _:
            raise row.fault("text", "must be a list of paragraphs")
    words = " ".join(_BULLET.sub("", part) for part in body).split()
    for start in range(0, len(words), WORDS):
        text = " ".join(words[start : start + WORDS])
        yield Passage(passage_id=f"{page}-{start // WORDS}", title=title, text=text)


def _passage(row: Row) -> Passage:
    if row.has("contents") and not row.has("text"):
        title, text = parted(row.text("contents"))
        if not text:
            raise row.fault("contents", "must be a title, a line break and a text")
    else:
        title = row.text("title", numbers=True)
        text = row.text("text")
    text = text.strip()
    if not row.has("id"):
        return named_by_content(title, text)
    return Passage(passage_id=row.text("id", numbers=True), title=title, text=text)


def _read_paragraphs(path: Path) -> Iterator[tuple[str, Passage]]:
    title = path.name.removesuffix(".gz").removesuffix(TEXT)
    with open_text(path) as lines:
        paragraphs = (group for blank, group in groupby(pieces(lines), key=lambda line: not line.strip()) if not blank)
        for number, paragraph in enumerate(paragraphs, start=1):
            where = f"{path}, paragraph {number}"
            yield where, named_by_content(title, _joined(paragraph, where).strip())


def _joined(paragraph: Iterable[str], where: str) -> str:
    """The text of a paragraph; raises ValueError if it is longer than LONGEST_ROW."""
    text = ""
    for line in paragraph:
        text += line
        if len(text) > LONGEST_ROW:
            raise ValueError(f"{where}: longer than {LONGEST_ROW} characters; part it by blank lines")
    return text


class Hashes:
    """64-bit hashes: sorted, in eight bytes each, but for the latest. The chance that two of 21 million clash: 1e-5."""

    def __init__(self) -> None:
        self._latest: set[int] = set()
        self._sorted = np.empty(0, np.uint64)

    def is_new(self, value: int) -> bool:
        """Whether none was equal; notes it."""
        place = int(np.searchsorted(self._sorted, np.uint64(value)))
        if value in self._latest or (place < len(self._sorted) and self._sorted[place] == value):
            return False
        self._latest.add(value)
        if len(self._latest) == LATEST:
            self._sorted = np.concatenate([self._sorted, np.fromiter(self._latest, np.uint64, LATEST)])
            self._sorted.sort()
            self._latest.clear()
        return True


class Distinct:
    """Holds every id to one meaning, a second one is a ValueError, and lets every passage through once.

    Ids of questions count within their data set and split.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # of questions by data set and split
        self.shared_ids: set[str] = set()  # of questions of several data sets or splits
        self._ids: set[str] = set()
        self._questions: set[tuple[str, str, str]] = set()  # data set, split and id
        self._contents = Hashes()  # of every passage
        self._passages = Hashes()  # of ids that passages brought along

    def take_question(self, question: Question, where: str) -> None:
        """Notes a question."""
        key = (question.dataset, question.split, question.question_id)
        if key in self._questions:
            raise ValueError(
                f"{where}: the id {question.question_id!r} is that of an earlier question; take one of the two out, "
                "or give it another id"
            )
        self._questions.add(key)
        self.counts[question.dataset, question.split] += 1
        (self.shared_ids if question.question_id in self._ids else self._ids).add(question.question_id)

    def is_new(self, passage: Passage, where: str) -> bool:
        """Whether no earlier passage has the same title and text; notes the passage."""
        content = content_id(passage.title, passage.text)
        if not self._contents.is_new(int(content, 16)):
            return False
        if passage.passage_id != content and not self._passages.is_new(int(content_id("", passage.passage_id), 16)):
            raise ValueError(
                f"{where}: the id {passage.passage_id!r} is that of an earlier passage with another text; give it "
                "another id, or leave out the ids of that file: passages are then named by their content"
            )
        return True


@dataclass(frozen=True, slots=True)
class Entry:
    """A question with the passages that it brings along."""

    where: str  # it was read from, for messages
    question: Question
    passages: Sequence[Passage] = ()


def from_files(name: str, params: FilesParams, split: str, seed: int) -> Portion[Entry]:
    """The questions of one split of a data set in files, in the order of its rows."""
    file = params.splits[split].file
    sample_size = params.splits[split].questions
    total = count(file)
    rows = read(file)
    if sample_size > total:
        raise ValueError(
            f"{file} holds {total} rows; prepare.files.{name}.{split}.questions asks for {sample_size}: lower it, or 0 "
            "for all"
        )
    if sample_size:
        sample = set(random.Random(derive(seed, "prepare", name, split)).sample(range(total), sample_size))
        rows = (row for at, row in enumerate(rows) if at in sample)
    form = FORMATS[params.format]

    def entry(row: Row) -> Entry:
        paragraphs = form.paragraphs(row) if params.corpus is None else []
        return Entry(str(row), form.question(row, name, split), [*starmap(named_by_content, paragraphs)])

    return sample_size or total, map(entry, form.complete(rows, file))


def interleave(portions: Sequence[Portion[T]]) -> Iterator[T]:
    """The items of all portions: wherever one stops, every portion has given the same share of its own."""

    def keyed(portion: Portion[T]) -> Iterator[tuple[float, T]]:
        size, items = portion
        return (((at + 0.5) / size, item) for at, item in enumerate(items))

    return (item for _, item in heapq.merge(*map(keyed, portions), key=itemgetter(0)))
