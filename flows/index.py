"""The index stage: `agent-r1 index`."""

from __future__ import annotations

import logging
import time

from agent_r1 import params
from agent_r1.search.index import build, describe

logger = logging.getLogger(__name__)


def index() -> None:
    """Builds the configured index over the prepared passages."""
    settings = params.load()
    search, folder = settings.search, settings.places.index
    started = time.perf_counter()
    build(search, settings.places.passages, folder)
    seconds = time.perf_counter() - started
    megabytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
    size = describe(folder).size
    logger.info("built the %s index of %d passages: %.1f MB in %.1f s", search.kind, size, megabytes, seconds)
