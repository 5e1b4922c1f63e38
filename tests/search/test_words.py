from __future__ import annotations

from agent_r1.search.bm25 import words


def test_words_fold_case_accents_and_plurals_but_keep_short_words() -> None:
    assert words("Émile's Films, a boss is U2") == ["emile", "s", "film", "a", "boss", "is", "u2"]
    assert words("ΔΕΛΤΑ İstanbul's gas") == ["δελτα", "istanbul", "s", "gas"]
