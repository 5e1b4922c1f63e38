"""How far a long reading has come."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

logger = logging.getLogger(__name__)
T = TypeVar("T")

LINE_EVERY = 100_000  # items


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Passes items on: under a bar on a terminal, elsewhere with a log line every LINE_EVERY items."""
    bar = tqdm(items, desc=what, total=total, unit=" rows", disable=None, leave=False)
    for number, item in enumerate(bar, start=1):
        yield item
        if bar.disable and number % LINE_EVERY == 0:
            logger.info("%s: %d%s", what, number, f" of {total}" if total else "")
