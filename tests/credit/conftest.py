"""Properties draw the same examples in every run and are not timed: a busy machine must not fail them."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("reproducible", deadline=None, derandomize=True, database=None)
settings.load_profile("reproducible")


@pytest.fixture
def quiet() -> Iterator[None]:
    """Drawn groups of one warn in every example."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
