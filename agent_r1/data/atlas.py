"""The generated world Atlas: people, films, companies, cities and countries with linked facts, and their passages."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import yaml

from agent_r1.params.prepare import AtlasParams
from agent_r1.records import Passage
from agent_r1.seeds import derive

_WORDS = {
    name: words.split()
    for name, words in yaml.safe_load("""
first names: Mara Jon Lena Otto Vera Hugo Nina Emil Rosa Karl Tara Finn Ida Ravi Selma Bruno Asta Leo Yara Milo Greta
  Theo Dora Ivan Lucia Nils Petra Omar Hana Jules Clara Sven Edda Tomas Wanda Felix Noor Arlo Kira Boris
last names: Quill Hale Brandt Sorrel Voss Tarn Lind Okoro Marsh Pell Drake Ferro Winter Kane Holm Reyes Stark Bloom
  Nolan Crane Vane Moss Keller Adler Finch Rhodes Sato Wells Hurst Blake Novak Fox Lowe Grant Petrov Silva Munro Hart
  Beck Dale Ray Stone Cole Frost Wolfe Lang Meyer Park Rossi Shaw Vega West Yates Zeller Abbott Burke Carver Dunn
  Ellis Flynn
adjectives: Silent Golden Broken Hidden Crimson Distant Empty Frozen Gentle Hollow Iron Jagged Last Lonely Midnight
  Narrow Open Pale Quiet Restless Scarlet Secret Shining Silver Sleeping Stolen Sudden Tender Twisted Velvet Wandering
  White Wild Wooden Bitter Burning Clever Double Eternal Fading
nouns: Harbor Garden River Mirror Window Mountain Lantern Bridge Island Forest Letter Kingdom Shadow Storm Tower
  Valley Voyage Whisper Witness Castle Circle Clock Desert Dream Engine Feather Flame Horizon Journey Key Lighthouse
  Meadow Orchard Palace Promise Road Sailor Song Station Summer
firms: Orlen Brix Calder Dynex Eltor Fenwick Gravon Helix Indra Jaspen Kelvar Lumen Magnar Nexal Optor Pyrex Quanta
  Rivon Solex Tavor Ultra Vortex Wexel Xanor Zenith Argon Boreal Cobalt Delphi Ember
kinds of firms: Group Forge Media Labs Trust Lines
cities: Tesk Arvik Belmar Corden Dravo Elsin Farrow Gorda Hestia Ilmar Jorval Kestan Lorne Mirov Nantel Ostra Pravo
  Quirra Rovena Selbar Torvald Ursk Vardo Wexdale Ystal Zadrin Almar Brask Cadmor Doven Estero Fontan Gallin Hovik
  Istra Jasna Kolvar Lisko Melk Nordan Orvek Plova Ravna Sarno Tolmin Umbra Velden Warden Yelsk Zorin Ambry Bolvar
  Crest Dunmor Elvar Forlin Girren Halden Imolt Kivik
countries: Veld Aronia Bastor Carvia Dorland Estmar Fenora Galdia Harvia Ithria Kordia Lumeria Morvia Norvel Ostland
  Parnia Quend Rovia Sundar Tarsia Uldor Vestria Wendia Yoria Zembla
currencies: crown florin ducat thaler mark shilling talent denar tolar ruble grosz peso zloty lira guilder kuna lev
  dinar forint koruna drachma escudo penny franc rand
languages: Veldic Aronish Basti Carvish Dorlic Estian Fenori Galdish Harvic Ithic Kordish Lumic Morvish Norvelic
  Ostric Parnic Quendi Rovish Sundari Tarsic Uldish Vestric Wendic Yorish Zemblan
""").items()
}

EntityFacts = dict[str, dict[str, str]]  # entity -> relation -> value

YEARS = [str(year) for year in range(1950, 2000)]
POOLS: dict[str, tuple[list[str], list[str]]] = {  # first and second words; one "" where a name is one word
    "person": (_WORDS["first names"], _WORDS["last names"]),
    "film": ([f"The {adjective}" for adjective in _WORDS["adjectives"]], _WORDS["nouns"]),
    "company": (_WORDS["firms"], _WORDS["kinds of firms"]),
    "city": (_WORDS["cities"], [""]),
    "country": (_WORDS["countries"], [""]),
    "currency": (_WORDS["currencies"], [""]),
    "language": (_WORDS["languages"], [""]),
}


def draw_names(kind: str, count: int, rng: random.Random) -> list[str]:
    """`count` different names of one kind, in which every word is used about equally often."""
    first, second = ([*words] for words in POOLS[kind])
    capacity = len(first) * len(second)
    if count > capacity:
        raise ValueError(f"Atlas has {capacity} {kind} names and {count} are asked for; lower it under prepare.atlas")
    rng.shuffle(first)
    rng.shuffle(second)
    # Walking both lists at once meets a pair again after lcm steps; one shift per lap makes every pair come up once.
    lap = math.lcm(len(first), len(second))
    return [f"{first[i % len(first)]} {second[(i + i // lap) % len(second)]}".strip() for i in range(count)]


# Two ways to tell an entity's facts, in any order. The value comes right after its relation and follows a space: a
# byte-level tokenizer then gives a name the same tokens here, in a question and in a query, and a small model can learn
# to find and to copy it.
_TELLINGS = ("{name} is a {kind} with {facts}.", "The {kind} {name} has {facts}.")


@dataclass(frozen=True, slots=True)
class World:
    """Who and what there is, and what is true of it."""

    kinds: dict[str, str]  # entity -> person, film, company, city or country
    facts: EntityFacts


def build_world(params: AtlasParams, seed: int) -> World:
    """The world of a seed. A ValueError says that names do not suffice, or cities for the countries' capitals."""
    if params.cities < params.countries:
        raise ValueError(
            f"prepare.atlas.cities {params.cities} cannot give {params.countries} countries a capital each; "
            f"raise cities to {params.countries} or more"
        )
    rng = random.Random(derive(seed, "atlas", "world"))
    sizes = {
        "person": params.people,
        "film": params.films,
        "company": params.companies,
        "city": params.cities,
        "country": params.countries,
    }
    names = {kind: draw_names(kind, size, rng) for kind, size in sizes.items()}
    kinds = {entity: kind for kind, entities in names.items() for entity in entities}
    return World(kinds, _draw_facts(names, rng))


def tell(world: World, seed: int) -> list[Passage]:
    """One passage per entity, titled with its name."""
    rng = random.Random(derive(seed, "atlas", "passages"))
    return [
        Passage(passage_id=f"atlas-{i:05d}", title=name, text=_tell_of(name, kind, world.facts[name], rng))
        for i, (name, kind) in enumerate(world.kinds.items())
    ]


def _tell_of(name: str, kind: str, facts: dict[str, str], rng: random.Random) -> str:
    *most, last = (f"the {relation} {value}" for relation, value in rng.sample(list(facts.items()), len(facts)))
    return rng.choice(_TELLINGS).format(name=name, kind=kind, facts=f"{', '.join(most)} and {last}")


def _draw_facts(names: dict[str, list[str]], rng: random.Random) -> EntityFacts:
    people, films, companies, cities, countries = names.values()
    facts = {name: _draw({"birth city": cities, "birth year": YEARS, "employer": companies}, rng) for name in people}
    for person, spouse in zip(people[::2], people[1::2], strict=False):  # of an odd number the last stays unmarried
        facts[person]["spouse"] = spouse
        facts[spouse]["spouse"] = person
    for name, cast in zip(films, [rng.sample(people, 2) for _ in films], strict=True):
        facts[name] = {"director": cast[0], "lead actor": cast[1]} | _draw(
            {"studio": companies, "release year": YEARS}, rng
        )
    for name in companies:
        facts[name] = _draw({"founder": people, "headquarters": cities, "founding year": YEARS}, rng)
    return facts | _draw_places(people, cities, countries, rng)


def _draw_places(people: list[str], cities: list[str], countries: list[str], rng: random.Random) -> EntityFacts:
    """The facts of cities and countries; city i lies in country i while there are countries, and is its capital."""
    facts = {}
    homes = countries + [rng.choice(countries) for _ in cities[len(countries) :]]
    for name, home in zip(cities, homes, strict=True):
        facts[name] = {"country": home} | _draw({"mayor": people}, rng)
    currencies = draw_names("currency", len(countries), rng)
    languages = draw_names("language", len(countries), rng)
    for name, capital, currency, language in zip(countries, cities, currencies, languages, strict=False):
        facts[name] = {"capital": capital, "currency": currency, "language": language}
    return facts


def _draw(pools: dict[str, list[str]], rng: random.Random) -> dict[str, str]:
    """A value for each relation out of its pool."""
    return {relation: rng.choice(pool) for relation, pool in pools.items()}
