"""Comparing answers: the official HotpotQA evaluation (Yang et al. 2018), which normalises like SQuAD 1.1.

It is left where nothing of a gold answer would stay: `A`, `The The` and `&` keep articles and punctuation. Of scripts
without blanks every letter counts as a word.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from agent_r1.letters import LETTER, UNSPACED

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_words = re.compile(rf"{LETTER}|[^\s{UNSPACED}]+").findall
CLOSED = frozenset({"yes", "no", "noanswer"})  # these earn no credit for partial overlap


def normalize(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", _with_articles(text)).split())


def _with_articles(text: str) -> str:
    return fold(text.translate(_WITHOUT_PUNCTUATION))


def fold(text: str) -> str:
    """Lower case, single spaces."""
    return " ".join(text.lower().split())


def _comparable(answer: str, gold: str) -> tuple[str, str]:
    """Both in the first form that leaves something of the gold: normalised, with articles, with punctuation too."""
    form = next((form for form in (normalize, _with_articles) if form(gold)), fold)
    return form(answer), form(gold)


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1.0 where the normalised answer equals a normalised gold answer, else 0.0. An empty answer equals none."""
    pairs = (_comparable(answer, gold) for gold in golds)
    return float(any(answer_text == gold_text != "" for answer_text, gold_text in pairs))


def f1(answer: str, golds: Sequence[str]) -> float:
    """The best overlap of words, or letters of scripts without blanks, with a gold answer, in [0, 1].

    `yes`, `no` and `noanswer` match themselves alone.
    """
    return max((_f1(*_comparable(answer, gold)) for gold in golds), default=0.0)


def contains(answer: str, golds: Sequence[str]) -> float:
    """1.0 where the words of a gold answer stand in the answer in a row, else 0.0. Not exact match."""
    return float(any(_has(*_comparable(answer, gold)) for gold in golds))


def occurs(phrase: str, text: str) -> bool:
    """Whether the words of the phrase, normalised, stand in the text in a row; false for a phrase without words."""
    return _has(normalize(text), normalize(phrase))


def _has(text: str, words: str) -> bool:
    return bool(words) and f" {' '.join(_words(words))} " in f" {' '.join(_words(text))} "


def _f1(answer: str, gold: str) -> float:
    if answer != gold and (answer in CLOSED or gold in CLOSED):
        return 0.0
    answer_words = _words(answer)
    gold_words = _words(gold)
    shared = (Counter(answer_words) & Counter(gold_words)).total()
    return 2 * shared / (len(answer_words) + len(gold_words)) if shared else 0.0
