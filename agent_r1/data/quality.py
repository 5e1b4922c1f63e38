"""The questions of a prepared data set that a person should look at, counted by kind."""

from __future__ import annotations

import reprlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from agent_r1.answers import CLOSED, contains, fold, normalize
from agent_r1.params.prepare import BUILT_IN
from agent_r1.records import QA, Question
from agent_r1.tables import open_rows, read_rows


class Review:
    """Prepared questions, those of the generated world apart, and the passages of their gold titles, read once."""

    def __init__(self, questions: Path, passages: Path) -> None:
        self._rows = [row for row in read_rows(questions, Question) if row.dataset != BUILT_IN]
        self._texts = _texts(passages, {title for row in self._rows for title in row.gold_titles})

    def complaints(self) -> list[str]:
        """A line for each data set and kind that has any, with their number and the first.

        The kinds: questions with the text of an earlier one, but for case and blanks; answers of which normalisation
        leaves nothing; gold titles that no passage has; answers, `yes` and `no` apart, that stand in none of their gold
        passages.
        """
        firsts: dict[str, Question] = {}
        examples: dict[str, list[str]] = defaultdict(list)
        for row in self._rows:
            if row.env == QA:
                first = firsts.setdefault(fold(row.text), row)
                for kind, texts in self._faults(row, first).items():
                    examples[f"{row.dataset}: {kind}"] += texts
        return [f"{kind}: {len(texts)}, such as {reprlib.repr(texts[0])}" for kind, texts in examples.items() if texts]

    def evidence(self) -> Iterator[str]:
        """A line for each data set and split with gold titles: what the passages can answer.

        All gold titles of a question have passages, and in these stands an answer, or it is `yes` or `no`.
        """
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for row in filter(attrgetter("gold_titles"), self._rows):
            there = all(title in self._texts for title in row.gold_titles)
            answers = int(there and _stands(row, self._gold(row)))
            counts[f"{row.dataset}, {row.split}"] += Counter(questions=1, titles=int(there), answers=answers)
        for name, count in counts.items():
            yield (
                f"{name}: the passages have all gold titles of {count['titles']} of {count['questions']} questions, "
                f"and an answer of {count['answers']} stands in them"
            )

    def _gold(self, row: Question) -> str:
        """The gold passages of a question, as far as there are any."""
        return "\n".join(text for title in row.gold_titles for text in self._texts.get(title, []))

    def _faults(self, row: Question, first: Question) -> dict[str, list[str]]:
        """The texts of a question that each kind complains of; `first` is the first question of its text."""
        text = self._gold(row)
        stands = not text or _stands(row, text)
        return {
            f"questions of {row.split} that stand in {first.split} already": [] if row is first else [row.text],
            "answers of articles and punctuation alone, which are compared with them": [
                answer for answer in row.answers if not normalize(answer)
            ],
            "gold titles of no passage, so that no search can find them": [
                title for title in row.gold_titles if title not in self._texts
            ],
            "answers that stand in none of their gold passages": [] if stands else row.answers[:1],
        }


def _stands(row: Question, text: str) -> bool:
    return bool(CLOSED.intersection(map(normalize, row.answers)) or contains(text, row.answers))


def _texts(passages: Path, titles: set[str]) -> dict[str, list[str]]:
    """The passages of these titles by title, as far as there are any, each with it."""
    texts: dict[str, list[str]] = defaultdict(list)
    value_set = pa.array(titles, pa.string())
    with open_rows(passages) as file:
        for batch in file.iter_batches(columns=["title", "text"]):
            for row in batch.filter(pc.is_in(batch["title"], value_set=value_set)).to_pylist():
                texts[row["title"]].append(f"{row['title']} {row['text']}")
    return texts
