"""The best passages by BM25 among millions, window by window: only what may still reach the k-th best is added up.

Compiled by numba when first called, which takes seconds. A folder `__pycache__` or the user's cache keeps it, where one
of them may be written to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from agent_r1.records import Floats, Floats32, Int32s, Int64s

Function = TypeVar("Function", bound=Callable[..., Any])
EPS = float(np.finfo(np.float32).eps)
SEEK = 32  # pairs that are read in a row in the time in which one is sought


def compiled(function: Function) -> Function:
    """A function of arrays and numbers as machine code, in which other threads go on."""
    compile_now = partial(njit, nogil=True, error_model="numpy")
    try:
        return cast(Function, compile_now(cache=True)(function))
    except RuntimeError:  # neither folder may be written to
        return cast(Function, compile_now()(function))


class Columns(NamedTuple):
    """All pairs of a word and a passage, word by word, and what a score is made from."""

    passages: Int32s  # [P] positions, ascending for each word
    counts: NDArray[Any]  # [P] occurrences
    lengths: NDArray[Any]  # [N] words of each passage
    saturations: Floats  # by such a length


class Terms(NamedTuple):
    """The words of a query, by the most that a passage gets for them; one that stands there twice is two."""

    starts: Int64s  # [T] where the pairs begin that lie in the window
    stops: Int64s  # [T] and where they end
    ends: Int64s  # [T] where those of the word end
    rarities: Floats32  # [T]
    bounds: Floats32  # [T] the most that a passage gets, ascending


class Sums(NamedTuple):
    """What the passages of a window have so far."""

    base: int  # the position of its first passage
    values: Floats32  # [window]
    places: Int64s  # [window] of those above 0, in any order; the rest is undefined


@compiled
def best(columns: Columns, terms: Terms, order: Int64s, k: int, window: int) -> Int64s:
    """Positions of the best `k` passages, best first; equal scores rank by position. `order`: the query, as terms.

    In a window, words are added up from the one that gives most on, until the others could not lift a passage to the
    k-th best score (MaxScore: Turtle and Flood 1995); those are then added for the passages that they may still lift.
    What is left is scored anew, in the query's order, on which a sum of floats depends.
    """
    values = np.zeros(window, np.float32)
    places = np.empty(window, np.int64)
    rests = np.zeros(len(terms.bounds) + 1)  # the most that terms before t give in the window
    positions = np.zeros(k, np.int64)
    scores = np.zeros(k, np.float32)
    slack = terms.bounds.sum() * len(terms.bounds) * EPS  # of sums in another order
    for base in range(0, len(columns.lengths), window):
        sums = Sums(base, values, places)
        enter(columns, terms, base + window, rests)
        count = candidates(columns, terms, sums, rests, scores[-1] - slack)
        for place in places[:count]:
            if values[place] >= scores[-1] - slack:
                insert(positions, scores, base + place, exact(columns, terms, order, base + place))
            values[place] = 0
    return positions[scores > 0]


@compiled
def enter(columns: Columns, terms: Terms, end: int, rests: Floats) -> None:
    """Moves the terms on to the window up to position `end`, and writes `rests` [T + 1]."""
    for t in range(len(terms.ends)):
        terms.starts[t] = terms.stops[t]
        terms.stops[t] = seek(columns.passages, terms.starts[t], terms.ends[t], end)
        rests[t + 1] = rests[t]
        if terms.stops[t] > terms.starts[t]:
            rests[t + 1] += terms.bounds[t]


@compiled
def candidates(columns: Columns, terms: Terms, sums: Sums, rests: Floats, least: float) -> int:
    """Adds up what may reach the score `least`, and gives how many passages may."""
    t = len(terms.ends)
    count = 0
    while t > 0 and rests[t] >= least:
        t -= 1
        count = add(columns, terms, t, sums, count, widen=True)
    count = sift(sums, count, least - rests[t])
    while t > 0 and count > 0:
        t -= 1
        if terms.stops[t] - terms.starts[t] < SEEK * count:
            add(columns, terms, t, sums, count, widen=False)
        else:
            add_sought(columns, terms, t, sums, count)
        count = sift(sums, count, least - rests[t])
    return count


@compiled
def add(columns: Columns, terms: Terms, t: int, sums: Sums, count: int, widen: bool) -> int:
    """Adds a term to the `count` passages above 0, and to others if it may `widen` them; gives how many they are."""
    for pair in range(terms.starts[t], terms.stops[t]):
        place = columns.passages[pair] - sums.base
        if sums.values[place] == 0:
            if not widen:
                continue
            sums.places[count] = place
            count += 1
        sums.values[place] += score(columns, pair, terms.rarities[t])
    return count


@compiled
def add_sought(columns: Columns, terms: Terms, t: int, sums: Sums, count: int) -> None:
    """Adds a term to the first `count` places."""
    for place in sums.places[:count]:
        sums.values[place] += score_at(columns, terms, t, sums.base + place)


@compiled
def sift(sums: Sums, count: int, least: float) -> int:
    """Keeps the places whose sum is at least so much, and gives how many they are."""
    left = 0
    for place in sums.places[:count]:
        if sums.values[place] >= least:
            sums.places[left] = place
            left += 1
        else:
            sums.values[place] = 0
    return left


@compiled
def exact(columns: Columns, terms: Terms, order: Int64s, passage: int) -> np.float32:
    """The score of a passage of the window."""
    total = np.float32(0)
    for t in order:
        total += score_at(columns, terms, t, passage)
    return total


@compiled
def score_at(columns: Columns, terms: Terms, t: int, passage: int) -> np.float32:
    """The score of a passage of the window for a term, once; 0 without it."""
    pair = seek(columns.passages, terms.starts[t], terms.stops[t], passage)
    if pair == terms.stops[t] or columns.passages[pair] != passage:
        return np.float32(0)
    return score(columns, pair, terms.rarities[t])


@compiled
def score(columns: Columns, pair: int, rarity: np.float32) -> np.float32:
    """BM25 of a pair."""
    count = np.float64(columns.counts[pair])
    saturation = columns.saturations[columns.lengths[columns.passages[pair]]]
    return np.float32(np.float64(rarity) * (count / (saturation + count)))


@compiled
def seek(passages: Int32s, first: int, end: int, passage: int) -> int:
    """The first place from `first` on whose passage is not before this one, or `end`; steps double, then halve."""
    step = 1
    last = first
    while last < end and passages[last] < passage:
        first = last + 1
        last += step
        step *= 2
    last = min(last, end)
    while first < last:
        middle = (first + last) // 2
        if passages[middle] < passage:
            first = middle + 1
        else:
            last = middle
    return first


@compiled
def insert(positions: Int64s, scores: Floats32, position: int, score: np.float32) -> None:
    """Puts a passage among the best, or drops it."""
    place = len(scores)
    while place > 0 and (scores[place - 1], -positions[place - 1]) < (score, -position):
        place -= 1
        if place + 1 < len(scores):
            scores[place + 1] = scores[place]
            positions[place + 1] = positions[place]
    if place < len(scores):
        scores[place] = score
        positions[place] = position
