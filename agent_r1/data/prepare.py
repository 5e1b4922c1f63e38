"""The prepare stage: data sets become questions and passages on disk."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from agent_r1.data.mixture import Distinct, Entry, Portion, from_files, interleave, read_passages
from agent_r1.data.questions import generate_atlas
from agent_r1.data.sources import progress
from agent_r1.params import PrepareParams
from agent_r1.params.stages import BUILT_IN
from agent_r1.records import Passage, Question
from agent_r1.tables import row_writer

logger = logging.getLogger(__name__)

QUESTIONS, PASSAGES = "questions.parquet", "passages.parquet"
SPLITS = ("train", "dev", "test")


def prepare(params: PrepareParams, directory: Path) -> None:
    """Writes questions.parquet and passages.parquet to `directory`.

    On an error what was there before stays whole, and nothing else is left behind.

    Raises:
        FileNotFoundError, ValueError: a data set is missing, malformed or cannot be generated.
        OSError: the disk is full or not writable.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".prepare.", dir=directory) as unfinished:
        staging = Path(unfinished)
        write(params, staging)
        for name in (QUESTIONS, PASSAGES):
            (staging / name).replace(directory / name)


def write(params: PrepareParams, directory: Path) -> None:
    """Writes questions.parquet and passages.parquet, holding a few dozen bytes of every row in memory.

    Questions stand split by split, the data sets evenly mixed in each. Passages are those that rows bring along, then
    the generated world's, then those of every corpus; equal ones once. Raises what `prepare` raises.
    """
    counts: Counter[tuple[str, str]] = Counter()
    distinct = Distinct()
    questions, passages = directory / QUESTIONS, directory / PASSAGES
    with row_writer(questions, Question) as add_question, row_writer(passages, Passage) as add_passage:
        generated = generate_atlas(params.atlas, params.seed) if BUILT_IN in params.datasets else None
        for entry in _entries(params, generated.questions if generated else []):
            distinct.take_question(entry.question, entry.where)
            add_question(entry.question)
            counts[entry.question.dataset, entry.question.split] += 1
            for passage in entry.passages:
                if distinct.is_new(passage, entry.where):
                    add_passage(passage)
        for where, passage in _searchable(params, generated.passages if generated else []):
            if distinct.is_new(passage, where):
                add_passage(passage)
    if not pq.read_metadata(passages).num_rows:
        raise ValueError("there are no passages to search; check the corpus files under prepare.files")
    _warn_of_missing_gold(questions, passages)
    logger.info("prepared questions %s", {"/".join(key): count for key, count in counts.items()})


def _entries(params: PrepareParams, generated: Sequence[Question]) -> Iterator[Entry]:
    for split in SPLITS:
        portions = []
        for name in params.datasets:
            if name == BUILT_IN:
                entries = [Entry(BUILT_IN, question) for question in generated if question.split == split]
                portions.append(Portion(len(entries), entries))
            elif split in params.files[name].splits:
                portions.append(from_files(name, params.files[name], split, params.seed))
        yield from progress(interleave(portions), f"{split} questions", sum(portion.size for portion in portions))


def _searchable(params: PrepareParams, generated: Sequence[Passage]) -> Iterator[tuple[str, Passage]]:
    """The passages that do not come with a question; a corpus that several data sets name is read once."""
    yield from ((BUILT_IN, passage) for passage in generated)
    named = (params.files[name].corpus for name in params.datasets if name != BUILT_IN)
    for corpus in dict.fromkeys(path for path in named if path is not None):
        yield from progress(read_passages(corpus), f"passages of {corpus.name}")


def _warn_of_missing_gold(questions: Path, passages: Path) -> None:
    """Says how many gold passages no search can find: those of HotpotQA's fullwiki rows, or of another corpus."""
    titles = pq.read_table(passages, columns=["title"])["title"].combine_chunks()
    asked = pq.read_table(questions, columns=["dataset", "gold_titles"])
    for dataset in pc.unique(asked["dataset"]).to_pylist():
        golds = pc.list_flatten(asked.filter(pc.field("dataset") == dataset)["gold_titles"])
        missing = golds.filter(pc.invert(pc.is_in(golds, value_set=titles)))
        if missing:
            logger.warning(
                "%s: %d of %d gold titles, such as %r, are titles of no passage, so no search can find them",
                dataset,
                len(missing),
                len(golds),
                missing[0].as_py(),
            )
