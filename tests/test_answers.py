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
    ("Beyoncé Knowles", ["Beyoncé"], 0, 2 / 3, 1),
    ("ZÜRICH", ["Zürich"], 1, 1, 1),  # lower case beyond ASCII
    ("Straße", ["STRASSE"], 0, 0, 0),  # lower, not folded: ß is not ss
    ("1939\u20131945", ["1939-1945"], 0, 0, 0),  # only ASCII punctuation goes: the dash stays, the hyphen does not
    ("1939-1945", ["19391945"], 1, 1, 1),
    ("\u201cKiss\u201d", ["Kiss"], 0, 0, 0),  # so do typographic quotes
    ('"Kiss"', ["Kiss"], 1, 1, 1),
    ("東京", ["東京"], 1, 1, 1),
    ("東京 都", ["東京"], 0, 4 / 5, 1),  # of scripts without blanks each letter counts: 2 x 2 / (3 + 2)
    ("東京都", ["東京"], 0, 4 / 5, 1),
    ("iPhone 手机", ["手机"], 0, 4 / 5, 1),
    ("iPhone手机", ["iphone"], 0, 1 / 2, 1),
    ("カラス", ["ガラス"], 0, 2 / 3, 0),
    ("ที่นี่", ["ที่"], 0, 2 / 3, 1),  # a letter has its vowel and tone: 2 x 1 / (2 + 1)
    ("ที", ["ที่"], 0, 0, 0),
    ("नई दिल्ली", ["दिल्ली"], 0, 2 / 3, 1),  # Hindi has blanks
    ("Tesk\u00a0City", ["Tesk City"], 1, 1, 1),  # any white space parts words
    ("A", ["A"], 1, 1, 1),  # normalised, nothing would be left of the gold: articles stay, in the answer too
    ("a.", ["A"], 1, 1, 1),
    ("the", ["A"], 0, 0, 0),
    ("Vitamin A", ["A"], 0, 2 / 3, 1),
    ("A", ["Vitamin A"], 0, 0, 0),  # something is left of this gold: the usual rules
    ("The The", ["the - the"], 1, 1, 1),
    ("The", ["The The"], 0, 2 / 3, 0),
    ("&", ["&"], 1, 1, 1),  # of this not even articles would be left: punctuation stays
    ("+", ["&"], 0, 0, 0),
    ("C & A", ["&"], 0, 1 / 2, 1),
    ("", ["&"], 0, 0, 0),
    ("", ["A", "&"], 0, 0, 0),
    ("an A the", ["the"], 0, 1 / 2, 1),
    ("", [""], 0, 0, 0),  # an empty answer never matches
    ("another", ["other"], 0, 0, 0),  # "an" goes only as a word
    ("Vitamin A", ["Vitamin"], 1, 1, 1),  # "A" is an article wherever it stands
    ("A.B.", ["AB"], 1, 1, 1),  # punctuation goes before articles: "ab" is none
    ("the-end", ["theend"], 1, 1, 1),
    ("$1,000", ["1000"], 1, 1, 1),
    ("1.000", ["1000"], 1, 1, 1),
    ("10 000", ["10,000"], 0, 0, 0),
    ("The Beatles' album", ["Beatles album"], 1, 1, 1),
    ("yes", ["no"], 0, 0, 0),
    ("NO!", ["no"], 1, 1, 1),
    ("yes", ["Yes Minister"], 0, 0, 0),  # a closed answer against a span
    ("no man", ["no"], 0, 0, 1),
    ("no man", ["No Man's Land"], 0, 2 / 5, 0),  # as a word of a span "no" counts: {no}, and man is not mans; 2 x 1/5
    ("noanswer", ["noanswer"], 1, 1, 1),
    ("no answer", ["noanswer"], 0, 0, 0),
    ("yes", ["no", "yes"], 1, 1, 1),
    ("yes sir", ["yes", "yes sir no sir"], 0, 2 / 3, 1),  # 0 against the closed one, 2 x 2 / (2 + 4) against the other
    ("G. Stanley Hall", ["Stanley Hall", "G Stanley Hall"], 1, 1, 1),  # an alias
    ("Hall", ["G. Stanley Hall", "Stanley Hall"], 0, 2 / 3, 0),  # 2 x 1 / (1 + 3) and 2 x 1 / (1 + 2)
    ("Mask of Fu Manchu", ["The Mask Of Fu Manchu"], 1, 1, 1),  # 2Wiki writes titles so
    ("one two three four", ["three four five"], 0, 4 / 7, 0),
    ("a a b b", ["b a"], 0, 2 / 3, 1),  # articles first: "b b" against "b", 2 x 1 / (2 + 1)
]


@pytest.mark.parametrize(("answer", "golds", "em", "overlap", "inside"), PAIRS)
def test_worked_examples(answer: str, golds: list[str], em: float, overlap: float, inside: float) -> None:
    assert exact_match(answer, golds) == em
    assert f1(answer, golds) == pytest.approx(overlap)
    assert contains(answer, golds) == inside


def test_the_table_is_long_enough() -> None:
    assert len({(answer, *golds) for answer, golds, *_ in PAIRS}) == len(PAIRS) >= 60


def test_normalisation_drops_case_punctuation_articles_and_spacing() -> None:
    assert normalize(" The  Cat, an owl\tand A dog's. ") == "cat owl and dogs"


@settings(deadline=None)
@given(st.text())
def test_normalised_text_is_single_spaced_and_equal_to_itself(text: str) -> None:
    once = normalize(text)
    assert once == " ".join(once.split())
    assert exact_match(text, [text]) == float(bool(text.strip()))


@settings(deadline=None)
@given(st.text(), st.text())
def test_f1_is_symmetric_and_bounded_by_exact_match(answer: str, gold: str) -> None:
    score = f1(answer, [gold])
    assert 0 <= score <= 1
    assert not (normalize(answer) and normalize(gold)) or score == f1(gold, [answer])
    if normalize(gold) and exact_match(answer, [gold]):
        assert score == contains(answer, [gold]) == 1


def test_no_golds_earn_nothing() -> None:
    assert (exact_match("x", []), f1("x", []), contains("x", [])) == (0, 0, 0)
