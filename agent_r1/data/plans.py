"""Plans: the searches by which a question is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent_r1.records import Question

Facts = Mapping[str, Mapping[str, str]]  # entity -> relation -> value


@dataclass(frozen=True, slots=True)
class Hop:
    """One search."""

    query: str
    entity: str  # what is asked about
    relation: str  # what is asked of it; "" where that is not known
    value: str  # what the search reveals


@dataclass(frozen=True, slots=True)
class Plan:
    """A course of searches and the answer they lead to."""

    hops: tuple[Hop, ...]  # never empty
    answer: str
    sign: str = ""  # + or - where the answer is worked out of what two hops reveal


def look_up(facts: Facts, entity: str, relation: str) -> Hop:
    """The hop from an entity to one of its facts."""
    return Hop(f"{relation} of {entity}", entity, relation, facts[entity][relation])


def plan_from_titles(question: Question) -> Plan:
    """A plan for a question of which only the gold titles are known: each is searched for in turn.

    Titles that the question mentions come first, because the others must be found on the way. Where no title is known,
    the question itself is searched for.
    """
    text = question.text
    titles = sorted(question.gold_titles, key=lambda title: title.lower() not in text.lower()) or [text]
    values = [*titles[1:], question.answers[0]]
    hops = tuple(Hop(title, title, "", value) for title, value in zip(titles, values, strict=True))
    return Plan(hops, question.answers[0])


def calculate(first: str, sign: str, second: str) -> str:
    """The sum or difference of two years."""
    return str(int(first) + int(second) if sign == "+" else int(first) - int(second))
