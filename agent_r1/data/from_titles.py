"""Demonstrations from gold titles: searches along the hops of a real question, as far as the index bears them out."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import NamedTuple

from agent_r1.answers import normalize
from agent_r1.data.demonstrations import answer_action, call_action, findings
from agent_r1.data.formats import FORMATS
from agent_r1.data.questions import Facts, Hop, Plan, generate_atlas, plan_from_titles
from agent_r1.data.sources import read
from agent_r1.params.prepare import BUILT_IN, PrepareParams
from agent_r1.records import Question

logger = logging.getLogger(__name__)

Pages = Sequence[tuple[str, str]]  # title and text of each passage, as an episode reads them

CLOSED = ("yes", "no")  # answers that no passage has to hold

_WORD = re.compile(r"\w+")
_YEAR = re.compile(r"\b[12]\d{3}\b")
_BRACKETS = re.compile(r"\s*\([^()]*\)$")  # of a title: `Thomas Carr (director)`
_SENTENCE = re.compile(r"(?<=[^\W_]{2}[.!?])\s+|(?<=[)\]\"'][.!?])\s+")  # no end after an initial
_LONGEST_QUOTE = 160  # characters


class NotBorneOutError(Exception):
    """The passages do not lead to the answer; the message says why."""


class Reading(NamedTuple):
    """How a demonstrator reads."""

    search: Callable[[str], Pages]  # a query's result as an episode shows it
    max_steps: int
    quotes: bool  # whether a thought quotes the sentence that states a finding


def make_plans(params: PrepareParams, questions: Sequence[Question]) -> tuple[dict[str, Plan], Facts]:
    """A plan for every question by question_id, and the facts of the generated world (none for real data).

    Of real questions the training rows are read again: they may say what every hop reveals. Raises the errors of
    `prepare` for them.
    """
    plans = {row.question_id: plan_from_titles(row) for row in questions if row.dataset != BUILT_IN}
    datasets = {row.dataset for row in questions}
    for name in datasets & params.files.keys():
        hops_of = FORMATS[params.files[name].format].hops
        train = params.files[name].train
        if not train or not hops_of:
            continue
        for row in read(train.file):
            row_id = row.text(row.first("_id", "id"), numbers=True)
            for question_id in plans.keys() & {row_id, f"{name}/train/{row_id}"}:  # longer where ids clash
                if hops := hops_of(row):
                    plans[question_id] = replace(plans[question_id], hops=tuple(hops))
    if BUILT_IN not in datasets:
        return plans, {}
    atlas = generate_atlas(params.atlas, params.seed)
    return {**atlas.plans, **plans}, atlas.facts


def borne_out(
    questions: Sequence[Question], count: int, act: Callable[[Question], list[str]]
) -> tuple[list[Question], dict[str, list[str]]]:
    """The first `count` questions that can be demonstrated, and how `act` does those of real data, by question_id.

    Says how many were left out, and why.
    """
    usable = list[Question]()
    actions = dict[str, list[str]]()
    reasons = Counter[str]()
    for question in questions:
        if len(usable) == count:
            break
        try:
            if question.dataset != BUILT_IN:
                actions[question.question_id] = act(question)
            usable.append(question)
        except NotBorneOutError as reason:
            reasons[str(reason)] += 1
    if reasons:
        why = ", ".join(f"{reason} ({number})" for reason, number in reasons.most_common())
        attempts = reasons.total() + len(usable)
        logger.info("%d of %d questions cannot be demonstrated: %s", reasons.total(), attempts, why)
    return usable, actions


def act_from_titles(plan: Plan, question: Question, reading: Reading, passages: Pages | None = None) -> list[str]:
    """The texts of the actions for a question of which gold titles or evidences are known, without end tokens.

    It searches for one hop after the other, and for none whose passage it has read. A query is written as it stands in
    the question or in a passage that was read; a sub-question of the data set is searched for as it is, and where the
    question names no gold title, it is searched for itself. A thought before each further action names what was found,
    in the passage's own words. With `passages` it answers from those, at once.

    Raises NotBorneOutError where a gold passage is not among the results of its search, does not state what the data
    say, or nothing that was read has the answer (yes and no apart), and where that takes more than `max_steps` actions.
    """
    pages = dict[str, str](passages or ())
    actions = list[str]()
    chains = _chains(plan, question)
    thought = _need(chains)
    for chain in chains:
        for place, hop in enumerate(chain):
            if hop.entity not in pages and passages is None:
                query = _query(hop, chain[:place], question, pages)
                following = f"Next {query}. " if actions and not (place and thought) else ""
                actions.append(call_action((thought + following).strip(), "search", {"query": query}))
                thought = ""
                pages |= reading.search(query)
            page = _page(hop, pages, question)
            chain[place] = _stated(hop, page)
            thought += _finding(chain[place], page, quotes=reading.quotes)
    if len(actions) >= reading.max_steps:
        raise NotBorneOutError(f"it takes more than {reading.max_steps} steps")
    if len(chains) > 1:
        thought = (thought if reading.quotes else "") + _side_by_side(chains, question.answers[0])
    return [*actions, answer_action(_answer(question, pages), thought)]


def _chains(plan: Plan, question: Question) -> list[list[Hop]]:
    """The hops in chains: the question names where one begins, and every other goes on from the value most like it.

    Without relations they are one chain: a sub-question may go on from several values.
    """
    chains = list[list[Hop]]()
    for hop in plan.hops:
        if not chains or (hop.relation and first_written(_names(hop), question.text)):
            chains.append([hop])
        else:
            max(chains, key=lambda chain: SequenceMatcher(None, chain[-1].value, hop.query).ratio()).append(hop)
    return chains


def _query(hop: Hop, previous_hops: Sequence[Hop], question: Question, pages: Mapping[str, str]) -> str:
    if not (hop.relation or _by_title(hop)):
        return hop.query  # a sub-question
    written = first_written(
        [*_names(hop), *(previous.value for previous in previous_hops[-1:])], _read(pages, question.text)
    )
    if pages and not written:
        raise NotBorneOutError("the title of a gold passage was not read")
    return written or question.text


def _by_title(hop: Hop) -> bool:
    """Whether a gold title is all that is known of it."""
    return not hop.relation and hop.query == hop.entity


def _names(hop: Hop) -> list[str]:
    return [hop.entity, hop.query, _BRACKETS.sub("", hop.entity)]


def _read(pages: Mapping[str, str], question: str = "") -> str:
    return "\n".join([question, *pages, *pages.values()])


def _page(hop: Hop, pages: Mapping[str, str], question: Question) -> str:
    """The text of a hop's gold passage; all that was read where no gold title is known."""
    if hop.entity == question.text and pages:
        return _read(pages)
    if hop.entity not in pages:
        raise NotBorneOutError("a gold passage is not among the results")
    return pages[hop.entity]


def _stated(hop: Hop, page: str) -> Hop:
    """The hop with its value as the gold passage has it; "" where the value is a guess by titles alone."""
    value = "" if hop.value.lower() in CLOSED else first_written([hop.value], page)
    if not value and not _by_title(hop):
        raise NotBorneOutError("a gold passage does not state what the data say")
    return replace(hop, value=value)


def _answer(question: Question, pages: Mapping[str, str]) -> str:
    """The answer as it was read."""
    if question.answers[0].lower() in CLOSED:
        return question.answers[0]
    written = first_written(question.answers, _read(pages))
    if not written:
        raise NotBorneOutError("the answer is in none of the passages")
    return written


def first_written(phrases: Iterable[str], text: str) -> str:
    """The first phrase whose words stand in a text in a row, as they stand there; "" for none.

    Case and punctuation do not matter.
    """
    for phrase in phrases:
        words = r"\W+".join(re.escape(word) for word in _WORD.findall(phrase))
        bracket = r"\)?" if phrase.endswith(")") else ""
        match = re.search(rf"\b{words}\b{bracket}", text, re.IGNORECASE) if words else None
        if match:
            return match[0]
    return ""


def _need(chains: Sequence[Sequence[Hop]]) -> str:
    relations = [f"the {hop.relation}" for hop in max(chains, key=len) if hop.relation]
    whose = " of each" if len(chains) > 1 else ""
    return f"I need {', then '.join(relations)}{whose}. " if relations else "I look it up. "


def _finding(hop: Hop, page: str, *, quotes: bool) -> str:
    """States a finding; before it the sentence that does so in the passage, or the words around it where that is long.

    A hop without a value states nothing.
    """
    if not hop.value:
        return ""
    quote = ""
    if quotes:
        sentence = next((sentence for sentence in _SENTENCE.split(page) if hop.value in sentence), hop.value)
        end = max(sentence.index(hop.value) + len(hop.value), _LONGEST_QUOTE)
        quote = f'"{sentence[max(0, end - _LONGEST_QUOTE) : end]}" '
    return quote + (findings([hop]) or f"Found {hop.value}. ")


def _side_by_side(chains: Sequence[Sequence[Hop]], answer: str) -> str:
    """The findings on each of those that are compared, and how the last ones compare."""
    summary = "".join(f"{chain[0].query}: {', '.join(hop.value for hop in chain)}. " for chain in chains)
    values = {normalize(chain[-1].value) for chain in chains}
    if answer.lower() in CLOSED:
        if (len(values) == 1) != (answer.lower() == "yes"):
            raise NotBorneOutError("the passages do not bear out the yes or no")
        return f"{summary}{'The same' if len(values) == 1 else 'Not the same'}. "
    years = {year for value in values for year in _YEAR.findall(value)}
    return f"{summary}{min(years)} is earlier. " if len(years) == len(chains) else summary
