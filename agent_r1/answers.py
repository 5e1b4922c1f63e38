"""Comparing answers: the official HotpotQA evaluation (Yang et al. 2018), which normalises like SQuAD 1.1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset({"yes", "no", "noanswer"})  # these earn no credit for partial overlap


def normalize(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1.0 where the normalised answer equals a normalised gold answer, else 0.0."""
    return float(normalize(answer) in {normalize(gold) for gold in golds})


def f1(answer: str, golds: Sequence[str]) -> float:
    """The best word overlap with a gold answer, in [0, 1]; `yes`, `no` and `noanswer` match themselves alone."""
    return max((_f1(normalize(answer), normalize(gold)) for gold in golds), default=0.0)


def contains(answer: str, golds: Sequence[str]) -> float:
    """1.0 where the words of a gold answer stand in the answer in a row, else 0.0. Not exact match."""
    return float(any(occurs(gold, answer) for gold in golds))


def occurs(phrase: str, text: str) -> bool:
    """Whether the words of the phrase, normalised, stand in the text in a row; false for a phrase without words."""
    words = normalize(phrase)
    return bool(words) and f" {words} " in f" {normalize(text)} "


def _f1(answer: str, gold: str) -> float:
    if answer != gold and (answer in _CLOSED or gold in _CLOSED):
        return 0.0
    answer_words, gold_words = answer.split(), gold.split()
    shared = (Counter(answer_words) & Counter(gold_words)).total()
    return 2 * shared / (len(answer_words) + len(gold_words)) if shared else 0.0
