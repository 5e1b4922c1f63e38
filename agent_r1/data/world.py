"""The generated world Atlas: people, films, companies, cities and countries with linked facts, and their passages."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from agent_r1.params import AtlasParams
from agent_r1.records import Passage
from agent_r1.seeds import derive


def _words(text: str) -> list[str]:
    return text.split()


_FIRST = _words("""
Mara Jon Lena Otto Vera Hugo Nina Emil Rosa Karl Tara Finn Ida Ravi Selma Bruno Asta Leo Yara Milo Greta Theo
Dora Ivan Lucia Nils Petra Omar Hana Jules Clara Sven Edda Tomas Wanda Felix Noor Arlo Kira Boris
""")
_LAST = _words("""
Quill Hale Brandt Sorrel Voss Tarn Lind Okoro Marsh Pell Drake Ferro Winter Kane Holm Reyes Stark Bloom Nolan
Crane Vane Moss Keller Adler Finch Rhodes Sato Wells Hurst Blake Novak Fox Lowe Grant Petrov Silva Munro Hart
Beck Dale Ray Stone Cole Frost Wolfe Lang Meyer Park Rossi Shaw Vega West Yates Zeller Abbott Burke Carver Dunn
Ellis Flynn
""")
_ADJECTIVE = _words("""
Silent Golden Broken Hidden Crimson Distant Empty Frozen Gentle Hollow Iron Jagged Last Lonely Midnight Narrow
Open Pale Quiet Restless Scarlet Secret Shining Silver Sleeping Stolen Sudden Tender Twisted Velvet Wandering
White Wild Wooden Bitter Burning Clever Double Eternal Fading
""")
_NOUN = _words("""
Harbor Garden River Mirror Window Mountain Lantern Bridge Island Forest Letter Kingdom Shadow Storm Tower Valley
Voyage Whisper Witness Castle Circle Clock Desert Dream Engine Feather Flame Horizon Journey Key Lighthouse
Meadow Orchard Palace Promise Road Sailor Song Station Summer
""")
_FIRM = _words("""
Orlen Brix Calder Dynex Eltor Fenwick Gravon Helix Indra Jaspen Kelvar Lumen Magnar Nexal Optor Pyrex Quanta
Rivon Solex Tavor Ultra Vortex Wexel Xanor Zenith Argon Boreal Cobalt Delphi Ember
""")
_FIRM_KIND = _words("Group Forge Media Labs Trust Lines")
_CITY = _words("""
Tesk Arvik Belmar Corden Dravo Elsin Farrow Gorda Hestia Ilmar Jorval Kestan Lorne Mirov Nantel Ostra Pravo
Quirra Rovena Selbar Torvald Ursk Vardo Wexdale Ystal Zadrin Almar Brask Cadmor Doven Estero Fontan Gallin Hovik
Istra Jasna Kolvar Lisko Melk Nordan Orvek Plova Ravna Sarno Tolmin Umbra Velden Warden Yelsk Zorin Ambry Bolvar
Crest Dunmor Elvar Forlin Girren Halden Imolt Kivik
""")
_COUNTRY = _words("""
Veld Aronia Bastor Carvia Dorland Estmar Fenora Galdia Harvia Ithria Kordia Lumeria Morvia Norvel Ostland Parnia
Quend Rovia Sundar Tarsia Uldor Vestria Wendia Yoria Zembla
""")
_CURRENCY = _words("""
crown florin ducat thaler mark shilling talent denar tolar ruble grosz peso zloty lira guilder kuna lev dinar
forint koruna drachma escudo penny franc rand
""")
_LANGUAGE = _words("""
Veldic Aronish Basti Carvish Dorlic Estian Fenori Galdish Harvic Ithic Kordish Lumic Morvish Norvelic Ostric
Parnic Quendi Rovish Sundari Tarsic Uldish Vestric Wendic Yorish Zemblan
""")

POOLS: dict[str, tuple[list[str], list[str]]] = {  # first and second words; one "" where a name is one word
    "person": (_FIRST, _LAST),
    "film": ([f"The {adjective}" for adjective in _ADJECTIVE], _NOUN),
    "company": (_FIRM, _FIRM_KIND),
    "city": (_CITY, [""]),
    "country": (_COUNTRY, [""]),
    "currency": (_CURRENCY, [""]),
    "language": (_LANGUAGE, [""]),
}


def draw_names(kind: str, count: int, rng: random.Random) -> list[str]:
    """`count` different names of one kind, in which every word is used about equally often.

    Raises:
        ValueError: the pool has fewer names.
    """
    first, second = ([*words] for words in POOLS[kind])
    capacity = len(first) * len(second)
    if count > capacity:
        raise ValueError(f"Atlas has {capacity} {kind} names and {count} are asked for; lower it under prepare.atlas")
    rng.shuffle(first)
    rng.shuffle(second)
    # Walking both lists at once meets a pair again after lcm steps; one shift per lap makes every pair come up once.
    lap = math.lcm(len(first), len(second))
    return [f"{first[i % len(first)]} {second[(i + i // lap) % len(second)]}".strip() for i in range(count)]


Entities = dict[str, dict[str, str]]  # entity -> relation -> value

YEARS = [str(year) for year in range(1950, 2000)]

# Two ways to tell an entity's facts, in any order. The value comes right after its relation and follows a space: a
# byte-level tokenizer then gives a name the same tokens here, in a question and in a query, and a small model can learn
# to find and to copy it.
_TELLINGS = ("{name} is a {kind} with {facts}.", "The {kind} {name} has {facts}.")


@dataclass(frozen=True, slots=True)
class World:
    """Who and what there is, and what is true of it."""

    kinds: dict[str, str]  # entity -> person, film, company, city or country
    facts: Entities

    def of_kind(self, kind: str) -> list[str]:
        """The entities of one kind, in their order."""
        return [entity for entity, its_kind in self.kinds.items() if its_kind == kind]


def build_world(params: AtlasParams, seed: int) -> World:
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
    people, films = draw_names("person", params.people, rng), draw_names("film", params.films, rng)
    companies, cities = draw_names("company", params.companies, rng), draw_names("city", params.cities, rng)
    countries = draw_names("country", params.countries, rng)
    facts = {
        "person": _people(people, companies, cities, rng),
        "film": _films(films, people, companies, rng),
        "company": _companies(companies, people, cities, rng),
        "city": _cities(cities, people, countries, rng),
        "country": _countries(countries, cities, rng),
    }
    kinds = {entity: kind for kind, entities in facts.items() for entity in entities}
    return World(kinds, {entity: known for entities in facts.values() for entity, known in entities.items()})


def tell(world: World, seed: int) -> list[Passage]:
    """One passage per entity, titled with its name."""
    rng = random.Random(derive(seed, "atlas", "passages"))
    return [
        Passage(passage_id=f"atlas-{i:05d}", title=name, text=_tell_of(name, kind, world.facts[name], rng))
        for i, (name, kind) in enumerate(world.kinds.items())
    ]


def _tell_of(name: str, kind: str, facts: dict[str, str], rng: random.Random) -> str:
    *most, last = (f"the {relation} {value}" for relation, value in rng.sample(list(facts.items()), len(facts)))
    told = f"{', '.join(most)} and {last}"
    return rng.choice(_TELLINGS).format(name=name, kind=kind, facts=told)


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
        name: {"founder": rng.choice(people), "headquarters": rng.choice(cities), "founding year": rng.choice(YEARS)}
        for name in companies
    }


def _cities(cities: list[str], people: list[str], countries: list[str], rng: random.Random) -> Entities:
    """Capitals come first: city i lies in country i while there are countries."""
    homes = countries + [rng.choice(countries) for _ in cities[len(countries) :]]
    return {name: {"country": home, "mayor": rng.choice(people)} for name, home in zip(cities, homes, strict=True)}


def _countries(countries: list[str], cities: list[str], rng: random.Random) -> Entities:
    currencies = draw_names("currency", len(countries), rng)
    languages = draw_names("language", len(countries), rng)
    capitals = cities[: len(countries)]
    return {
        name: {"capital": capital, "currency": currency, "language": language}
        for name, capital, currency, language in zip(countries, capitals, currencies, languages, strict=True)
    }
