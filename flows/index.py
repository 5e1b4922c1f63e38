"""The index stage: `python -m flows.index`."""

from __future__ import annotations

import logging
import time

from agent_r1 import params
from agent_r1.project import INDEX, PASSAGES
from agent_r1.search.index import build, describe

logger = logging.getLogger(__name__)


def index() -> None:
    """Builds the configured index over the prepared passages."""
    search = params.load().search
    started = time.perf_counter()
    build(search, PASSAGES, INDEX)
    seconds = time.perf_counter() - started
    megabytes = sum(file.stat().st_size for file in INDEX.rglob("*") if file.is_file()) / 1e6
    size = describe(INDEX).size
    logger.info("built the %s index of %d passages: %.1f MB in %.1f s", search.kind, size, megabytes, seconds)


if __name__ == "__main__":
    from flows.stage import run_stage

    run_stage(index)
