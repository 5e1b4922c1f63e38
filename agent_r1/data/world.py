"""The generated world Atlas: people, films, companies, cities and countries with linked facts, and their passages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter

from agent_r1.data.names import draw
from agent_r1.params import AtlasParams
from agent_r1.records import Passage
from agent_r1.seeds import derive

YEARS = [str(year) for year in range(1950, 2000)]

# Two ways to tell each kind's facts. A sentence whose fact is unknown (an unmarried person) is left out. Every value
# follows a space: a byte-level tokenizer then gives a name the same tokens here, in a question and in a query. A
# word of a query that few passages of a kind share would outweigh the name, so both ways use the rare ones.
_TELLINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "person": (
        (
            "{name} was born in {birth city} in {birth year}.",
            "{name} works for {employer}.",
            "The spouse of {name} is {spouse}.",
        ),
        (
            "The employer of {name} is {employer}.",
            "{name} was born in {birth year} in {birth city}.",
            "{name} is married to {spouse}.",
        ),
    ),
    "film": (
        (
            "{name} is a film directed by {director} with {lead actor} as the lead actor.",
            "It was made by {studio} and came out in {release year}.",
        ),
        (
            "{name} is a film of {release year} from the studio {studio}.",
            "Its lead actor is {lead actor} and its director is {director}.",
        ),
    ),
    "company": (
        (
            "{name} is a company with the founding year {founding year} and the founder {founder}.",
            "Its headquarters are in {headquarters}.",
        ),
        (
            "{name} is a company with headquarters in {headquarters}.",
            "Its founder is {founder} and its founding year is {founding year}.",
        ),
    ),
    "city": (
        ("{name} is a city in the country {country}.", "Its mayor is {mayor}."),
        ("{name} is a city with the mayor {mayor}.", "It lies in the country {country}."),
    ),
    "country": (
        (
            "{name} is a country with the capital {capital}.",
            "Its currency is the {currency} and its language is {language}.",
        ),
        (
            "{name} is a country where people speak {language} and pay in {currency}.",
            "Its capital is {capital}.",
        ),
    ),
}


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
        Passage(
            passage_id=f"atlas-{i:05d}", title=name, text=_tell(rng.choice(_TELLINGS[kind]), name, world.facts[name])
        )
        for i, (name, kind) in enumerate(world.kinds.items())
    ]


def _tell(sentences: Sequence[str], name: str, facts: dict[str, str]) -> str:
    values = {"name": name, **facts}
    return " ".join(
        sentence.format_map(values)
        for sentence in sentences
        if all(field in values for _, field, _, _ in Formatter().parse(sentence) if field)
    )


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
