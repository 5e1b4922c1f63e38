"""Names: all different, made of few words that are used evenly."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agent_r1.answers import normalize
from agent_r1.data.world import POOLS, draw


def everything(kind: str) -> list[str]:
    first, second = POOLS[kind]
    return draw(kind, len(first) * len(second), random.Random(0))


def test_no_two_names_are_the_same_answer() -> None:
    names = [normalize(name) for kind in POOLS for name in everything(kind)]
    assert len(set(names)) == len(names) == sum(len(first) * len(second) for first, second in POOLS.values())


def test_all_names_together_use_few_words() -> None:
    words = {word for kind in POOLS for name in everything(kind) for word in name.split()}
    assert len(words) < 400


def test_a_word_belongs_to_one_kind() -> None:
    kinds = Counter(
        word for kind in POOLS for word in {w for name in everything(kind) for w in normalize(name).split()}
    )
    assert [word for word, count in kinds.items() if count > 1] == []


def test_words_are_used_evenly() -> None:
    names = draw("person", 240, random.Random(1))  # 40 first and 60 last names: six and four times each
    assert set(Counter(name.split()[0] for name in names).values()) == {6}
    assert set(Counter(name.split()[1] for name in names).values()) == {4}


def test_more_names_than_the_pool_has_are_refused() -> None:
    with pytest.raises(ValueError, match="2400 person names and 2401 are asked for"):
        draw("person", 2401, random.Random(0))
