"""The generated world Atlas: people, films, companies, cities and countries with linked facts, and their passages."""

from __future__ import annotations

import random
from dataclasses import dataclass

from agent_r1.data.names import draw
from agent_r1.params import AtlasParams
from agent_r1.records import Passage
from agent_r1.seeds import derive

YEARS = [str(year) for year in range(1950, 2000)]

# Two ways to tell an entity's facts, in any order. The value comes right after its relation and follows a space: a
# byte-level tokenizer then gives a name the same tokens here, in a question and in a query, and a small model can learn
# to find and to copy it.
_TELLINGS = ("{name} is a {kind} with {facts}.", "The {kind} {name} has {facts}.")


@dataclass(frozen=True, slots=True)
class World:
    """Who and what there is, and what is true of it."""

    kinds: dict[str, str]  # entity -> person, film, company, city or country
    facts: dict[str, dict[str, str]]  # entity -> relation -> value

    def of_kind(self, kind: str) -> list[str]:
        """The entities of one kind, in their order."""
        return [entity for entity, its_kind in self.kinds.items() if its_kind == kind]


def build(params: AtlasParams, seed: int) -> World:
    """The world of a seed.

    Raises:
        ValueError: more entities than names, or fewer cities than countries that need a capital.
    """
    if params.cities < params.countries:
        raise ValueError(
            f"prepare.atlas.cities {params.cities} cannot give {params.countries} countries a capital each; "
            f"raise cities to {params.countries} or more"
        )
    rng = random.Random(derive(seed, "atlas", "world"))
    people, films = draw("person", params.people, rng), draw("film", params.films, rng)
    companies, cities = draw("company", params.companies, rng), draw("city", params.cities, rng)
    countries = draw("country", params.countries, rng)
    facts = {
        "person": _people(people, companies, cities, rng),
        "film": _films(films, people, companies, rng),
        "company": _companies(companies, people, cities, rng),
        "city": _cities(cities, people, countries, rng),
        "country": _countries(countries, cities, rng),
    }
    kinds = {entity: kind for kind, entities in facts.items() for entity in entities}
    return World(kinds, {entity: known for entities in facts.values() for entity, known in entities.items()})


def passages(world: World, seed: int) -> list[Passage]:
    """One passage per entity, titled with its name."""
    rng = random.Random(derive(seed, "atlas", "passages"))
    return [
        Passage(passage_id=f"atlas-{i:05d}", title=name, text=_tell(name, kind, world.facts[name], rng))
        for i, (name, kind) in enumerate(world.kinds.items())
    ]


def _tell(name: str, kind: str, facts: dict[str, str], rng: random.Random) -> str:
    *most, last = (f"the {relation} {value}" for relation, value in rng.sample(list(facts.items()), len(facts)))
    told = f"{', '.join(most)} and {last}"
    return rng.choice(_TELLINGS).format(name=name, kind=kind, facts=told)


Entities = dict[str, dict[str, str]]


def _people(people: list[str], companies: list[str], cities: list[str], rng: random.Random) -> Entities:
    spouses = dict(zip(people[::2], people[1::2], strict=False))  # of an odd number the last stays unmarried
    spouses |= {wed: to for to, wed in spouses.items()}
    return {
        name: {
            "birth city": rng.choice(cities),
            "birth year": rng.choice(YEARS),
            "employer": rng.choice(companies),
            **({"spouse": spouses[name]} if name in spouses else {}),
        }
        for name in people
    }


def _films(films: list[str], people: list[str], companies: list[str], rng: random.Random) -> Entities:
    casts = [rng.sample(people, 2) for _ in films]
    return {
        name: {
            "director": director,
            "lead actor": lead_actor,
            "studio": rng.choice(companies),
            "release year": rng.choice(YEARS),
        }
        for name, (director, lead_actor) in zip(films, casts, strict=True)
    }


def _companies(companies: list[str], people: list[str], cities: list[str], rng: random.Random) -> Entities:
    return {
        name: {
            "founder": rng.choice(people),
            "headquarters": rng.choice(cities),
            "founding year": rng.choice(YEARS),
        }
        for name in companies
    }


def _cities(cities: list[str], people: list[str], countries: list[str], rng: random.Random) -> Entities:
    """Capitals come first: city i lies in country i while there are countries."""
    homes = countries + [rng.choice(countries) for _ in cities[len(countries) :]]
    return {name: {"country": home, "mayor": rng.choice(people)} for name, home in zip(cities, homes, strict=True)}


def _countries(countries: list[str], cities: list[str], rng: random.Random) -> Entities:
    currencies = draw("currency", len(countries), rng)
    languages = draw("language", len(countries), rng)
    capitals = cities[: len(countries)]
    return {
        name: {"capital": capital, "currency": currency, "language": language}
        for name, capital, currency, language in zip(countries, capitals, currencies, languages, strict=True)
    }
