"""What tests read from files: tables of cases that hold texts and numbers alone, and graphs of DVC's."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


class _Loader(yaml.SafeLoader):
    """Reads `!text [a, [b, 3], c]` as `abbbc`."""


def _text(loader: _Loader, node: yaml.SequenceNode) -> str:
    parts = loader.construct_sequence(node, deep=True)
    return "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts)


_Loader.add_constructor("!text", _text)


@functools.cache
def tables(folder: Path) -> dict[str, Any]:
    return yaml.load((folder / "cases.yaml").read_text(encoding="utf-8"), _Loader)


def cases(names: str) -> Callable[[Callable[..., None]], Any]:
    """Parametrises a test by the rows that `cases.yaml` beside its file has under its name."""

    def parametrised(test: Callable[..., None]) -> Any:
        folder = Path(test.__code__.co_filename).parent
        return pytest.mark.parametrize(names, tables(folder)[test.__name__.removeprefix("test_")])(test)

    return parametrised


def graph(name: str) -> str:
    """The text of a graph in tests/flows/graphs."""
    return (Path(__file__).parent / f"flows/graphs/{name}.yaml").read_text()


def laid(name: str) -> dict[str, Any]:
    """Parameters or files that a test lays into a project, of tests/flows/laid.yaml."""
    return yaml.safe_load((Path(__file__).parent / "flows/laid.yaml").read_text(encoding="utf-8"))[name]
