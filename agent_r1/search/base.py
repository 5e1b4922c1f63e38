"""What a search index is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agent_r1.records import Passage


class Search(Protocol):
    """An index over passages."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For each query its best passages, best first: `k` of them, fewer where fewer match."""
        ...
