"""The layouts of the published data sets, and of one's own: the question of a row, and the paragraphs beside it.

A field that is missing or malformed raises a ValueError, whose message names file, row and field.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from agent_r1.answers import exact_match
from agent_r1.data.questions import Hop
from agent_r1.data.sources import Row, read
from agent_r1.records import Question

FACTS = "supporting_facts"
ACCEPTED = "answer_aliases"  # the field of other accepted answers
ALIASES = "id_aliases.json"  # in 2WikiMultihopQA's release, of all splits: JSON lines


class Format(NamedTuple):
    """How to read the rows of a data set."""

    question: Callable[[Row, str, str], Question]  # from a row, the data set's name and the split
    paragraphs: Callable[[Row], list[tuple[str, str]]]  # titles and texts that the row brings along, in its order
    complete: Callable[[Iterable[Row], Path], Iterable[Row]] = lambda rows, _: rows  # with a file beside theirs
    hops: Callable[[Row], list[Hop]] | None = None  # to be searched for in order; none where a row lacks them


def supported_question(row: Row, dataset: str, split: str, *, kinds: Sequence[str]) -> Question:
    """A question whose gold passages are those of its supporting facts, one hop each (HotpotQA, 2WikiMultihopQA).

    The facts' sentence numbers are not looked at: in some rows of the releases they are beyond their paragraph.
    """
    titles = list(dict.fromkeys(title for title, _ in row.pairs(FACTS, "sent_id")))
    return Question(
        question_id=row.text(row.first("_id", "id"), numbers=True),  # the releases say _id, the Hub says id
        dataset=dataset,
        split=split,
        text=row.text("question"),
        answers=_answers(row),
        gold_titles=titles,
        strata={"hops": str(len(titles)), "kind": row.choice("type", kinds)},
    )


def _answers(row: Row) -> list[str]:
    return list(dict.fromkeys([row.text("answer", numbers=True), *row.texts(ACCEPTED)]))


def with_aliases(rows: Iterable[Row], split: Path) -> Iterator[Row]:
    """The rows of a split with the other names of their answers, where the release's list of names is beside the file.

    Source: the evaluation script of 2WikiMultihopQA (github.com/Alab-NII/2wikimultihop), which accepts the aliases and
    demonyms of the entity that `answer_id` names.
    """
    alias_file = split.with_name(ALIASES)
    aliases = read(alias_file) if alias_file.exists() else iter(())
    names = {row.text("Q_id"): [*row.texts("aliases"), *row.texts("demonyms")] for row in aliases}
    for row in rows:
        other_names = names.get(str(row.fields.get("answer_id")), [])
        yield replace(row, fields={**row.fields, ACCEPTED: other_names}) if other_names else row


def evidence_hops(row: Row) -> list[Hop]:
    """The hops of 2WikiMultihopQA's evidences: triples of subject, relation and value.

    The passage of a triple is the supporting one of its subject's name, or else the most similar of the others.
    """
    triples = row.fields.get("evidences")
    if not isinstance(triples, list) or not all(_is_triple(triple) for triple in triples):
        return []
    subjects = [subject for subject, _, _ in triples]
    titles = [title for title, _ in row.pairs("supporting_facts", "sent_id")]
    candidates = [title for title in titles if title not in subjects] or titles
    return [
        Hop(subject, subject if subject in titles else get_close_matches(subject, candidates, 1, 0)[0], relation, value)
        for subject, relation, value in triples
    ]


def _is_triple(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(part, str) and part for part in value)


def decomposed_hops(row: Row) -> list[Hop]:
    """The hops of MuSiQue's decomposition: sub-questions, in which `#1` stands for the answer of the first."""
    titles = {fields.get("idx"): fields.get("title") for fields in row.objects("paragraphs")}
    hops = list[Hop]()
    for part in row.objects("question_decomposition"):
        match part:
            case {"question": str(query), "answer": str(value), "paragraph_support_idx": int(place)}:
                for number, hop in reversed(list(enumerate(hops, start=1))):
                    query = query.replace(f"#{number}", hop.value)
                hops.append(Hop(query.replace(" >> ", " "), str(titles.get(place)), "", value))
            case _:
                return []
    return hops


def joined_context(row: Row, *, separator: str) -> list[tuple[str, str]]:
    """The paragraphs of a context, their sentences joined. HotpotQA's fullwiki rows may lack gold ones."""
    paragraphs = row.pairs("context", "sentences")
    if not all(
        isinstance(sentences, list) and all(isinstance(sentence, str) for sentence in sentences)
        for _, sentences in paragraphs
    ):
        raise row.fault("context", "must hold [title, [sentence, ...]] pairs")
    return [(title, separator.join(sentences).strip()) for title, sentences in paragraphs]


def musique_question(row: Row, dataset: str, split: str) -> Question:
    """MuSiQue's question: a hop for each question it is composed of, its kind how they hang together (2hop to 4hop3).

    Two gold passages may share a title. A question that has no answer is refused.
    """
    if row.fields.get("answerable") is False:
        raise ValueError(f"{row}: not answerable, so this is MuSiQue-Full; use the files named musique_ans")
    question_id = row.text("id", numbers=True)
    hops = len(row.objects("question_decomposition"))
    titles = [title for title, _, is_gold in _marked_paragraphs(row) if is_gold]
    if not titles:
        raise row.fault("paragraphs", "must hold at least one with is_supporting: true")
    kind, separator, _ = question_id.partition("__")  # the release's ids begin with the kind: 3hop1__140786_2053_5289
    return Question(
        question_id=question_id,
        dataset=dataset,
        split=split,
        text=row.text("question"),
        answers=_answers(row),
        gold_titles=list(dict.fromkeys(titles)),
        strata={"hops": str(hops), "kind": kind if separator else f"{hops}hop"},
    )


def _marked_paragraphs(row: Row) -> list[tuple[str, str, bool]]:
    """Titles and texts of MuSiQue's paragraphs, and whether each is gold."""
    paragraphs = []
    for fields in row.objects("paragraphs"):
        match fields:
            case {"title": str(title), "paragraph_text": str(text), "is_supporting": bool(is_gold)}:
                paragraphs.append((title, text.strip(), is_gold))
            case _:
                raise row.fault("paragraphs", "must hold objects with title, paragraph_text and is_supporting")
    return paragraphs


def generic_question(row: Row, dataset: str, split: str) -> Question:
    """A question of a user's own.

    `question`, and `answers` (accepted ones, the canonical one first) or a single `answer`, must be there; `id`,
    `gold_titles`, `hops` and `kind` need not be, or may be null. Without an id the row's place is its id, without hops
    every gold title is one. An `answer` beside accepted ones has to be one of them. Other fields are passed over.
    """
    titles = row.texts("gold_titles")
    id_field = row.first("id", "_id")
    answers = _answers_of(row, "answers") if row.has("answers") else [row.text("answer", numbers=True)]
    if row.fields.get("answer") and not exact_match(row.text("answer", numbers=True), answers):
        raise row.fault("answer", f"must be one of the accepted answers, {reprlib.repr(answers)}, or left out")
    hops = row.text("hops", numbers=True) if row.has("hops") else str(max(1, len(titles)))
    if not re.fullmatch("[1-9][0-9]{0,5}", hops):
        raise row.fault("hops", "must be a number from 1 to 999999")
    return Question(
        question_id=row.text(id_field, numbers=True)
        if row.has(id_field)
        else f"{dataset}-{split}-{row.path.name}-{row.number}",
        dataset=dataset,
        split=split,
        text=row.text("question"),
        answers=answers,
        gold_titles=titles,
        strata={"hops": hops, "kind": row.text("kind") if row.has("kind") else "unknown"},
    )


def _answers_of(row: Row, field: str) -> list[str]:
    if answers := row.texts(field):
        return answers
    raise row.fault(field, "must hold at least one text that is not empty")


def flashrag_question(row: Row, dataset: str, split: str) -> Question:
    """A question of FlashRAG's collection, whose layout Search-R1 shares: `question`, `golden_answers` and `id`.

    Gold titles and kind are those of its `metadata`, where that has `supporting_facts` and `type`. Source:
    github.com/RUC-NLPIR/FlashRAG.
    """
    metadata = _metadata(row)
    fields = {
        **row.fields,
        "answers": _answers_of(row, "golden_answers"),
        "gold_titles": [title for title, _ in metadata.pairs(FACTS, "sent_id")] if metadata.has(FACTS) else [],
        "kind": metadata.fields.get("type"),
    }
    return generic_question(replace(row, fields=fields), dataset, split)


def flashrag_context(row: Row) -> list[tuple[str, str]]:
    """The paragraphs of the `metadata`, joined as in the release that they come from; none where it has no context."""
    metadata = _metadata(row)
    match metadata.fields.get("context"):
        case None:
            return []
        case {"title": titles, "content": sentences}:  # 2WikiMultihopQA's
            fields = {"context": {"title": titles, "sentences": sentences}}
            return joined_context(replace(metadata, fields=fields), separator=" ")
    return joined_context(metadata, separator="")


def _metadata(row: Row) -> Row:
    fields = row.fields.get("metadata") or {}
    if not isinstance(fields, dict):
        raise row.fault("metadata", "must be an object")
    return replace(row, fields=fields)


FORMATS = {
    "hotpotqa": Format(
        partial(supported_question, kinds=("bridge", "comparison")),
        partial(joined_context, separator=""),  # all sentences but the first open with their space
    ),
    "2wikimultihopqa": Format(
        partial(supported_question, kinds=("comparison", "bridge_comparison", "compositional", "inference")),
        partial(joined_context, separator=" "),  # sentences come without the spaces between them
        with_aliases,
        evidence_hops,
    ),
    "musique": Format(
        musique_question,
        lambda row: [(title, text) for title, text, _ in _marked_paragraphs(row)],
        hops=decomposed_hops,
    ),
    "generic": Format(generic_question, lambda _: []),  # a corpus of its own is searched
    "flashrag": Format(flashrag_question, flashrag_context),
}
