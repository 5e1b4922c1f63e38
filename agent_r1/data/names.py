"""The words that Atlas names are made of: few and short, so that each becomes one token of a small vocabulary."""

from __future__ import annotations

import math
import random


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
_FIRM_KIND = _words("""
Group Forge Media Labs Trust Lines
""")
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


def draw(kind: str, count: int, rng: random.Random) -> list[str]:
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
