"""Tables of cases that hold texts and numbers alone: they stand in a cases.yaml beside the tests."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@functools.cache
def tables(folder: Path) -> dict[str, list[Any]]:
    return yaml.safe_load((folder / "cases.yaml").read_text(encoding="utf-8"))


def cases(names: str) -> Callable[[Callable[..., None]], Any]:
    """Parametrises a test by the rows that `cases.yaml` beside its file has under its name."""

    def parametrised(test: Callable[..., None]) -> Any:
        folder = Path(test.__code__.co_filename).parent
        return pytest.mark.parametrize(names, tables(folder)[test.__name__.removeprefix("test_")])(test)

    return parametrised
