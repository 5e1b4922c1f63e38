"""Questions about Atlas, and the plans by which questions are answered."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agent_r1.answers import contains
from agent_r1.data.atlas import World, build_world, tell
from agent_r1.params.prepare import BUILT_IN, AtlasParams, AtlasShares
from agent_r1.records import Passage, Question
from agent_r1.seeds import derive

Facts = Mapping[str, Mapping[str, str]]  # entity -> relation -> value
Pair = tuple[str, str]  # of entities
Phrasings = dict[str, tuple[str, str]]  # relation -> two ways to say it


@dataclass(frozen=True, slots=True)
class Hop:
    """One search."""

    query: str
    entity: str  # the subject of the question
    relation: str  # to be looked up; "" where it is not known
    value: str  # the value that the search reveals


@dataclass(frozen=True, slots=True)
class Plan:
    """A course of searches and the answer they lead to."""

    hops: tuple[Hop, ...]  # never empty
    answer: str
    sign: str = ""  # + or - where the answer is calculated from the values of two hops


def look_up(facts: Facts, entity: str, relation: str) -> Hop:
    """The hop from an entity to one of its facts."""
    return Hop(f"{relation} of {entity}", entity, relation, facts[entity][relation])


def plan_from_titles(question: Question) -> Plan:
    """A plan for a question of which only the gold titles are known: each is searched for in turn.

    The value of each is the next title, and of the last the answer. Titles that the question mentions come first,
    because the others must be found on the way. Where no title is known, the question itself is searched for.
    """
    text = question.text
    titles = sorted(question.gold_titles, key=lambda title: title.lower() not in text.lower()) or [text]
    values = [*titles[1:], question.answers[0]]
    hops = tuple(Hop(title, title, "", value) for title, value in zip(titles, values, strict=True))
    return Plan(hops, question.answers[0])


def calculate(first: str, sign: str, second: str) -> str:
    """The sum or difference of two years."""
    return str(int(first) + int(second) if sign == "+" else int(first) - int(second))


class Atlas(NamedTuple):
    """The built-in data set: everything in it follows from the parameters and a seed."""

    questions: list[Question]  # of all splits
    plans: dict[str, Plan]  # how each is answered, by question_id
    passages: list[Passage]
    facts: Facts  # all that is true


def generate_atlas(params: AtlasParams, seed: int) -> Atlas:
    """The built-in data set. A ValueError says that its world or a pool of names is too small for what is asked."""
    world = build_world(params, seed)
    rows = generate_questions(world, params, seed)
    plans = {question.question_id: plan for question, plan in rows}
    return Atlas([question for question, _ in rows], plans, tell(world, seed), world.facts)


# Two ways to say each relation. Nested from the inside out they make a question of any number of hops.
_PHRASES: Phrasings = {
    "birth city": ("the birth city of {}", "the city where {} was born"),
    "birth year": ("the birth year of {}", "the year in which {} was born"),
    "employer": ("the employer of {}", "the company that {} works for"),
    "spouse": ("the spouse of {}", "the person married to {}"),
    "director": ("the director of {}", "the person who directed {}"),
    "lead actor": ("the lead actor of {}", "the star of {}"),
    "studio": ("the studio of {}", "the company that made {}"),
    "release year": ("the release year of {}", "the year in which {} came out"),
    "founder": ("the founder of {}", "the person who founded {}"),
    "headquarters": ("the headquarters of {}", "the city that {} is based in"),
    "founding year": ("the founding year of {}", "the year in which {} was founded"),
    "country": ("the country of {}", "the country where {} lies"),
    "mayor": ("the mayor of {}", "the person who runs {}"),
    "capital": ("the capital of {}", "the seat of government of {}"),
    "currency": ("the currency of {}", "the money used in {}"),
    "language": ("the language of {}", "the language spoken in {}"),
}
_SAME: Phrasings = {
    "employer": ("Do {} and {} work for the same company?", "Do {} and {} have the same employer?"),
    "birth city": ("Were {} and {} born in the same city?", "Do {} and {} have the same birth city?"),
    "director": ("Did the same person direct {} and {}?", "Do {} and {} have the same director?"),
    "studio": ("Did the same company make {} and {}?", "Do {} and {} have the same studio?"),
    "headquarters": ("Are {} and {} based in the same city?", "Do {} and {} have the same headquarters?"),
    "country": ("Do {} and {} lie in the same country?", "Are {} and {} in the same country?"),
}
_EARLIER: Phrasings = {
    "birth year": ("Who was born first, {} or {}?", "Who has the earlier birth year, {} or {}?"),
    "release year": ("Which film came out first, {} or {}?", "Which film has the earlier release year, {} or {}?"),
    "founding year": (
        "Which company was founded first, {} or {}?",
        "Which company has the earlier founding year, {} or {}?",
    ),
}

_SUM = ("What is the sum of {} and {}?", "What do you get if you add {} and {}?")
_AGE: Phrasings = {
    "release year": ("How old was {1} when {0} came out?", "What was the age of {1} in the release year of {0}?"),
    "founding year": ("How old was {1} when {0} was founded?", "What was the age of {1} in the founding year of {0}?"),
}


@dataclass(frozen=True, slots=True)
class Draft:
    """A question that has no place in a split yet."""

    text: str
    kind: str
    plan: Plan

    def question(self, split: str, number: int) -> Question:
        """The question with its place."""
        return Question(
            question_id=f"atlas-{split}-{number:05d}",
            dataset=BUILT_IN,
            split=split,
            text=self.text,
            answers=[self.plan.answer],
            gold_titles=[hop.entity for hop in self.plan.hops],
            strata={"hops": str(len(self.plan.hops)), "kind": self.kind},
        )


def generate_questions(world: World, params: AtlasParams, seed: int) -> list[tuple[Question, Plan]]:
    """All splits' questions and plans; no two share a text, or both the entities asked about and the relations."""
    sizes = {"train": params.train_questions, "dev": params.dev_questions, "test": params.test_questions}
    counts = {split: _counts(size, params.shares) for split, size in sizes.items()}
    drafts = {
        label: _take(generate(world, _rng(seed, label)), label, sum(count[label] for count in counts.values()))
        for label, generate in _KINDS.values()
    }
    return [row for split in sizes for row in _split(split, counts[split], drafts, _rng(seed, split))]


def _rng(seed: int, purpose: str) -> random.Random:
    return random.Random(derive(seed, "atlas", "questions", purpose))


def _counts(size: int, shares: AtlasShares) -> dict[str, int]:
    """How many questions of each label; yes/no ones come in pairs, and the last label gets the rest of rounding."""
    share_of = {label: getattr(shares, name) for name, (label, _) in _KINDS.items()}
    counts = {label: int(share * size) for label, share in share_of.items()}
    counts["yes/no"] -= counts["yes/no"] % 2
    *_, last = (label for label, share in share_of.items() if share)
    return {**counts, last: counts[last] + size - sum(counts.values())}


def _take(drafts: Iterator[Draft], label: str, count: int) -> Iterator[Draft]:
    subset = list(itertools.islice(drafts, count))
    if len(subset) < count:
        raise ValueError(
            f"the world has {len(subset)} {label} questions and {count} are asked for; raise people, films, companies "
            "or cities under prepare.atlas, or lower train_questions, dev_questions or test_questions"
        )
    return iter(subset)


def _split(
    split: str, counts: dict[str, int], drafts: dict[str, Iterator[Draft]], rng: random.Random
) -> list[tuple[Question, Plan]]:
    """Takes the split's share of every label and mixes them."""
    mixed = [draft for label, count in counts.items() for draft in itertools.islice(drafts[label], count)]
    rng.shuffle(mixed)
    return [(draft.question(split, number), draft.plan) for number, draft in enumerate(mixed)]


def _chains(world: World, length: int, rng: random.Random) -> Iterator[Draft]:
    """Questions that follow `length` facts from an entity to one that has not been passed before."""
    walks = [walk for entity in world.facts for walk in _walks(world, entity, length, {entity})]
    rng.shuffle(walks)
    for hops in walks:
        text = _chain_text(hops, world, rng)
        answer = hops[-1].value
        if not contains(text, [answer]):
            yield Draft(text, "lookup" if length == 1 else "bridge", Plan(hops, answer))


def _walks(world: World, entity: str, length: int, passed: set[str]) -> Iterator[tuple[Hop, ...]]:
    for relation, value in world.facts.get(entity, {}).items():
        if value not in passed:
            rests = _walks(world, value, length - 1, {*passed, value}) if length > 1 else [()]
            yield from ((look_up(world.facts, entity, relation), *rest) for rest in rests)


def _chain_text(hops: Sequence[Hop], world: World, rng: random.Random) -> str:
    phrase = hops[0].entity
    for hop in hops:
        phrase = rng.choice(_PHRASES[hop.relation]).format(phrase)
    return f"{'Who' if world.kinds.get(hops[-1].value) == 'person' else 'What'} is {phrase}?"


def _same(world: World, rng: random.Random) -> Iterator[Draft]:
    """A yes question, then a no question about the same relation: the relation does not give the answer away."""
    alike = [(relation, pair) for relation in _SAME for pair in _alike(world, relation)]
    rng.shuffle(alike)
    unlike = {relation: _unlike(world, relation, rng) for relation in _SAME}
    for relation, pair in alike:
        unlike_pair = next(unlike[relation], None)
        if unlike_pair is not None:
            yield _comparison(world, relation, pair, _SAME, "yes", rng)
            yield _comparison(world, relation, unlike_pair, _SAME, "no", rng)


def _earlier(world: World, rng: random.Random) -> Iterator[Draft]:
    """Which of two came first: a pair of each relation in turn, until all have run out."""
    for pairs in itertools.zip_longest(*(_unlike(world, relation, rng) for relation in _EARLIER)):
        for relation, pair in zip(_EARLIER, pairs, strict=True):
            if pair is not None:
                answer = min(pair, key=lambda entity: int(world.facts[entity][relation]))
                yield _comparison(world, relation, pair, _EARLIER, answer, rng)


def _sums(world: World, rng: random.Random) -> Iterator[Draft]:
    for first, second in _year_pairs(_year_hops(world, _EARLIER), _year_hops(world, _EARLIER), rng):
        phrases = [rng.choice(_PHRASES[hop.relation]).format(hop.entity) for hop in (first, second)]
        yield _arithmetic(rng.choice(_SUM).format(*phrases), first, second, "+")


def _ages(world: World, rng: random.Random) -> Iterator[Draft]:
    """How old a person was at an event of which the year is known."""
    for event, birth in _year_pairs(_year_hops(world, _AGE), _year_hops(world, ["birth year"]), rng):
        if int(event.value) > int(birth.value):
            yield _arithmetic(rng.choice(_AGE[event.relation]).format(event.entity, birth.entity), event, birth, "-")


def _arithmetic(text: str, first: Hop, second: Hop, sign: str) -> Draft:
    return Draft(text, "arithmetic", Plan((first, second), calculate(first.value, sign, second.value), sign))


def _year_hops(world: World, relations: Iterable[str]) -> list[Hop]:
    return [
        look_up(world.facts, entity, relation)
        for entity, facts in world.facts.items()
        for relation in relations
        if relation in facts
    ]


def _year_pairs(firsts: list[Hop], seconds: list[Hop], rng: random.Random) -> Iterator[tuple[Hop, Hop]]:
    """Pairs of different entities with a year each, mixed but not held in memory; no two entities are paired twice."""
    rng.shuffle(firsts)
    rng.shuffle(seconds)
    pairs: set[frozenset[str]] = set()
    for distance in range(len(seconds)):
        for place, hop in enumerate(firsts):
            partner = seconds[(place + distance) % len(seconds)]
            pair = frozenset((hop.entity, partner.entity))
            if len(pair) == 2 and pair not in pairs:
                pairs.add(pair)
                yield hop, partner


def _comparison(
    world: World, relation: str, pair: Pair, phrasings: Phrasings, answer: str, rng: random.Random
) -> Draft:
    entities = rng.sample(pair, 2)
    hops = tuple(look_up(world.facts, entity, relation) for entity in entities)
    return Draft(rng.choice(phrasings[relation]).format(*entities), "comparison", Plan(hops, answer))


def _alike(world: World, relation: str) -> Iterator[Pair]:
    by_value: dict[str, list[str]] = {}
    for entity, facts in world.facts.items():
        if relation in facts:
            by_value.setdefault(facts[relation], []).append(entity)
    for entities in by_value.values():
        yield from itertools.combinations(entities, 2)


def _unlike(world: World, relation: str, rng: random.Random) -> Iterator[Pair]:
    """All pairs of entities with different values, mixed but not held in memory."""
    entities = [entity for entity, facts in world.facts.items() if relation in facts]
    rng.shuffle(entities)
    for distance in range(1, len(entities)):
        for pair in zip(entities, entities[distance:], strict=False):
            if world.facts[pair[0]][relation] != world.facts[pair[1]][relation]:
                yield pair


# The kinds of questions by the name of their share: the label, which seeds the draws, and the drafts.
_KINDS: dict[str, tuple[str, Callable[[World, random.Random], Iterator[Draft]]]] = {
    "lookup": ("lookup", lambda world, rng: _chains(world, 1, rng)),
    "two_hops": ("bridge of 2 hops", lambda world, rng: _chains(world, 2, rng)),
    "three_hops": ("bridge of 3 hops", lambda world, rng: _chains(world, 3, rng)),
    "yes_no": ("yes/no", _same),
    "earlier": ("earlier", _earlier),
    "sum": ("sum", _sums),
    "age": ("age", _ages),
}
