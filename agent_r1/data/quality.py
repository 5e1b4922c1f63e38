"""The questions of a prepared data set that a person should look at, counted by kind."""

from __future__ import annotations

import reprlib
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from agent_r1.answers import CLOSED, contains, fold, normalize
from agent_r1.params.prepare import BUILT_IN
from agent_r1.records import QA, Question
from agent_r1.tables import open_rows, read_rows


def complaints(questions: Path, passages: Path) -> list[str]:
    """A line for each data set and kind that has any, with their number and the first; none of the generated world.

    The kinds: questions with the text of an earlier one, but for case and blanks; answers of which normalisation leaves
    nothing; gold titles that no passage has; answers, `yes` and `no` apart, that stand in none of their gold passages.
    """
    rows = [row for row in read_rows(questions, Question) if row.env == QA and row.dataset != BUILT_IN]
    evidences = _texts(passages, {title for row in rows for title in row.gold_titles})
    firsts: dict[str, Question] = {}
    examples: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        first = firsts.setdefault(fold(row.text), row)
        for kind, texts in _faults(row, first, evidences).items():
            examples[f"{row.dataset}: {kind}"] += texts
    return [f"{kind}: {len(texts)}, such as {reprlib.repr(texts[0])}" for kind, texts in examples.items() if texts]


def _faults(row: Question, first: Question, evidences: dict[str, list[str]]) -> dict[str, list[str]]:
    """The texts of a question that each kind complains of; `first` is the first question of its text."""
    evidence = "\n".join(text for title in row.gold_titles for text in evidences.get(title, []))
    stands = not evidence or CLOSED.intersection(map(normalize, row.answers)) or contains(evidence, row.answers)
    return {
        f"questions of {row.split} that stand in {first.split} already": [] if row is first else [row.text],
        "answers of articles and punctuation alone, which are compared with them": [
            answer for answer in row.answers if not normalize(answer)
        ],
        "gold titles of no passage, so that no search can find them": [
            title for title in row.gold_titles if title not in evidences
        ],
        "answers that stand in none of their gold passages": [] if stands else row.answers[:1],
    }


def _texts(passages: Path, titles: set[str]) -> dict[str, list[str]]:
    """The passages of these titles by title, as far as there are any, each with it."""
    texts: dict[str, list[str]] = defaultdict(list)
    value_set = pa.array(titles, pa.string())
    with open_rows(passages) as file:
        for batch in file.iter_batches(columns=["title", "text"]):
            for row in batch.filter(pc.is_in(batch["title"], value_set=value_set)).to_pylist():
                texts[row["title"]].append(f"{row['title']} {row['text']}")
    return texts
