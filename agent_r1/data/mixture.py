"""The questions of a split: of every data set as many as are asked for, evenly mixed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from agent_r1.data import generic, hotpotqa, musique, wikimultihop
from agent_r1.data.corpus import named_by_content
from agent_r1.data.rows import Row
from agent_r1.data.sources import count, read
from agent_r1.params import FilesParams
from agent_r1.records import Passage, Question
from agent_r1.seeds import derive

T = TypeVar("T")


class Format(NamedTuple):
    """How to read the rows of a data set."""

    question: Callable[[Row, str, str], Question]  # from a row, the data set's name and the split
    paragraphs: Callable[[Row], list[tuple[str, str]]]  # titles and texts that the row brings along


FORMATS = {
    "hotpotqa": Format(hotpotqa.question, hotpotqa.paragraphs),
    "2wikimultihopqa": Format(wikimultihop.question, wikimultihop.paragraphs),
    "musique": Format(musique.question, musique.paragraphs),
    "generic": Format(generic.question, generic.paragraphs),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A question with the passages that it brings along."""

    where: str  # it was read from, for messages
    question: Question
    passages: Sequence[Passage] = ()


@dataclass(frozen=True, slots=True)
class Portion(Generic[T]):
    """What one data set gives to a split."""

    size: int
    items: Iterable[T]  # as many, read only when they are taken


def from_files(name: str, params: FilesParams, split: str, seed: int) -> Portion[Entry]:
    """The questions of one split of a data set in files, in the order of its rows.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: a file or a row is malformed, or there are fewer rows than questions are asked for.
    """
    total, asked = count(params.splits[split].file), params.splits[split].questions
    if asked > total:
        raise ValueError(
            f"{params.splits[split].file} holds {total} rows; prepare.files.{name}.{split}.questions asks for {asked}: "
            "lower it, or 0 for all"
        )
    rows: Iterable[Row] = read(params.splits[split].file)
    if asked:
        chosen = set(random.Random(derive(seed, "prepare", name, split)).sample(range(total), asked))
        rows = (row for at, row in enumerate(rows) if at in chosen)
    return Portion(asked or total, (_entry(row, name, params, split) for row in rows))


def interleave(portions: Sequence[Portion[T]]) -> Iterator[T]:
    """The items of all portions: wherever one stops, every portion has given the same share of its own."""
    keyed = [_keyed(portion) for portion in portions]
    return (item for _, item in heapq.merge(*keyed, key=itemgetter(0)))


def _keyed(portion: Portion[T]) -> Iterator[tuple[float, T]]:
    return (((at + 0.5) / portion.size, item) for at, item in enumerate(portion.items))


def _entry(row: Row, name: str, params: FilesParams, split: str) -> Entry:
    form = FORMATS[params.format]
    paragraphs = form.paragraphs(row) if params.corpus is None else []
    return Entry(str(row), form.question(row, name, split), [named_by_content(*each) for each in paragraphs])
