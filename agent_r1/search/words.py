"""What counts as a word."""

from __future__ import annotations

import re
import unicodedata

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words that are matched: lower case, no accents, no plural s. Stop words stay: BM25 weighs them low.

    On HotpotQA folding accents and plurals each find more gold passages; leaving out stop words finds fewer.
    """
    return [singular(word) for word in raw_words(text)]


def raw_words(text: str) -> list[str]:
    """Lower case and no accents, but with their plural s."""
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return _WORD.findall(text.lower())


def singular(word: str) -> str:
    """Without a plural s; short words and those in -ss stay."""
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
