"""The contract of a search index, and the ways in which it may fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agent_r1.records import Passage

Positions = NDArray[np.int64]  # of passages in their corpus, from 0


class Search(Protocol):
    """An index over passages."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For each query its best passages, best first: `k` of them, fewer where fewer match.

        Raises:
            SearchUnavailable: the index cannot be reached.
        """
        ...


class Ranker(Protocol):
    """The part of an index that ranks passages by position, without their texts."""

    def rank(self, query: str, k: int) -> Positions:
        """Positions of the `k` best passages, best first, fewer where fewer match.

        Depends on the query and nothing else, and equal scores rank in the order of the passages: a search has one
        result, whatever is asked with it or before it.
        """
        ...


class SearchUnavailable(OSError):
    """A search that cannot be served now; the message says why."""


class SearchTimeout(SearchUnavailable):
    """A search that took too long."""
