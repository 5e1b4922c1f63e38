"""Answer comparison against values computed by hand from the official HotpotQA evaluation script."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.answers import contains, exact_match, f1, normalize

# answer, golds, exact match, F1 = 2 x shared words / (words of both), contains
PAIRS = [
    ("Tesk", ["Tesk"], 1, 1, 1),
    ("tesk", ["Tesk"], 1, 1, 1),
    ("Tesk.", ["Tesk"], 1, 1, 1),
    ("  Tesk \n", ["Tesk"], 1, 1, 1),
    ("The Silent Harbor", ["Silent Harbor"], 1, 1, 1),  # articles go
    ("a Silent, Harbor!", ["the silent harbor"], 1, 1, 1),
    ("Theo", ["o"], 0, 0, 0),  # "the" goes only as a word
    ("U.S.A.", ["USA"], 1, 1, 1),  # punctuation goes without leaving a space
    ("co-operate", ["cooperate"], 1, 1, 1),
    ("co operate", ["co-operate"], 0, 0, 0),  # two words against one
    ("Mara Quill", ["Mara"], 0, 2 / 3, 1),  # 2 x 1 / (2 + 1)
    ("Mara", ["Mara Quill"], 0, 2 / 3, 0),  # the gold is not inside the answer
    ("Quill Mara", ["Mara Quill"], 0, 1, 0),  # F1 ignores order
    ("Mara Quill was born in Tesk", ["Tesk"], 0, 2 / 7, 1),  # 2 x 1 / (6 + 1)
    ("Teskar", ["Tesk"], 0, 0, 0),  # inside a word does not count
    ("1957", ["1957"], 1, 1, 1),
    ("in 1957", ["1957"], 0, 2 / 3, 1),
    ("1958", ["1957"], 0, 0, 0),
    ("yes", ["yes"], 1, 1, 1),
    ("Yes.", ["yes"], 1, 1, 1),
    ("no", ["yes"], 0, 0, 0),
    ("yes it is", ["yes"], 0, 0, 1),  # a closed gold earns nothing but itself, overlap or not
    ("yes", ["yes it is"], 0, 0, 0),  # nor does a closed answer
    ("noanswer", ["no"], 0, 0, 0),
    ("", ["Tesk"], 0, 0, 0),
    ("the", ["Tesk"], 0, 0, 0),
    ("Lind", ["Quill", "Lind"], 1, 1, 1),  # the best gold counts
    ("Mara Lind", ["Mara Quill Moss", "Lind"], 0, 2 / 3, 1),  # 2/5 against the first, 2/3 against the second
    ("new new york", ["new york"], 0, 4 / 5, 1),  # a word counts as often as both have it: 2 x 2 / (3 + 2)
    ("café", ["cafe"], 0, 0, 0),  # accents stay
]


@pytest.mark.parametrize(("answer", "golds", "em", "overlap", "inside"), PAIRS)
def test_worked_examples(answer: str, golds: list[str], em: float, overlap: float, inside: float) -> None:
    assert exact_match(answer, golds) == em
    assert f1(answer, golds) == pytest.approx(overlap)
    assert contains(answer, golds) == inside


def test_normalisation_drops_case_punctuation_articles_and_spacing() -> None:
    assert normalize(" The  Cat, an owl\tand A dog's. ") == "cat owl and dogs"


@settings(deadline=None)
@given(st.text())
def test_normalised_text_is_single_spaced_and_equal_to_itself(text: str) -> None:
    once = normalize(text)
    assert once == " ".join(once.split())
    assert exact_match(text, [text]) == 1


@settings(deadline=None)
@given(st.text(), st.text())
def test_f1_is_symmetric_and_bounded_by_exact_match(answer: str, gold: str) -> None:
    score = f1(answer, [gold])
    assert 0 <= score <= 1
    assert score == f1(gold, [answer])
    if normalize(gold) and exact_match(answer, [gold]):
        assert score == contains(answer, [gold]) == 1


def test_no_golds_earn_nothing() -> None:
    assert (exact_match("x", []), f1("x", []), contains("x", [])) == (0, 0, 0)
