"""A small slice of the campaign of hostile inputs: `make hostile` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.hostile.campaign import KINDS, attempt, generator
from benchmarks.hostile.kind import Kind


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_hostile_inputs_are_refused_by_name_or_do_no_harm(kind: type[Kind], tmp_path: Path) -> None:
    made = kind(tmp_path)
    for index in range(max(3, min(20, kind.tried // 50))):
        assert not attempt(made, 0, index).defect, f"python -m benchmarks.hostile --kind '{kind.name}' --index {index}"


def test_an_input_follows_from_seed_and_index(tmp_path: Path) -> None:
    [kind] = [kind for kind in KINDS if kind.name == "actions"]
    first, again, other = (kind(tmp_path).make(generator(kind, 0, index)) for index in (1, 1, 2))
    assert first == again != other
