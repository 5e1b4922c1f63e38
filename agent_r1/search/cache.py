"""Searches that were made before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from agent_r1.records import Passage
from agent_r1.search.base import Search


class Cached(Search):
    """Remembers the latest searches of an index, by its hash, the query and k; a search that fails is not remembered.

    A search of the index has one result, so that remembering it changes nothing but time.
    """

    def __init__(self, index: Search, index_hash: str, entries: int) -> None:
        """Remembers at most so many searches; with 0 every search goes to the index."""
        self._index = index
        self._index_hash = index_hash
        self._entries = entries
        self._known: OrderedDict[tuple[str, str, int], list[Passage]] = OrderedDict()
        self._asked = self._hits = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        keys = [(self._index_hash, query, k) for query in queries]
        found = {key: self._known[key] for key in keys if key in self._known}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        self._asked += len(keys)
        self._hits += sum(key in found for key in keys)
        if missing:
            fresh = self._index.search([query for _, query, _ in missing], k)
            found.update(zip(missing, fresh, strict=True))
        self._remember(found)
        return [list(found[key]) for key in keys]

    def take_hit_share(self) -> float:
        """The share of the searches that were remembered, of those since this was last asked; 0 without any."""
        share = self._hits / self._asked if self._asked else 0.0
        self._asked = self._hits = 0
        return share

    def _remember(self, found: dict[tuple[str, str, int], list[Passage]]) -> None:
        for key, passages in found.items():
            self._known[key] = passages
            self._known.move_to_end(key)
        while len(self._known) > self._entries:
            self._known.popitem(last=False)
