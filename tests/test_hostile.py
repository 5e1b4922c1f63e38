"""A small slice of the campaign of hostile inputs: `make hostile` runs all of it."""

import re
from pathlib import Path

import pytest

from agent_r1 import harmless
from agent_r1.rollout import vllm_engine
from benchmarks.hostile.campaign import KINDS, attempt, generator
from benchmarks.hostile.kind import Kind
from benchmarks.hostile.leftovers import Leftovers
from benchmarks.hostile.names import Addresses

SLICE = 20  # inputs of a kind, at most


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_hostile_inputs_are_refused_by_name_or_do_no_harm(kind: type[Kind], tmp_path: Path) -> None:
    made = kind(tmp_path)
    for index in range(max(3, min(SLICE, kind.tried // 50))):
        assert not attempt(made, 0, index).defect, f"python -m benchmarks.hostile --kind '{kind.name}' --index {index}"


@pytest.mark.parametrize("part", ["_replacement", "_MARKUP", "CREDENTIALS", "_QUERY"])
def test_text_not_made_harmless_is_noticed(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of `agent_r1.harmless` in turn lets everything pass, wherever it is used."""
    monkeypatch.setattr(harmless, part, str if part == "_replacement" else re.compile("(?!)()()"))
    made = Addresses(tmp_path)
    assert any("is shown" in attempt(made, 0, index).defect for index in range(SLICE))


def test_what_holds_a_reader_up_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe of somebody else's that an engine's start opens; without the writer of the campaign it would wait."""
    monkeypatch.setattr(vllm_engine, "is_own", lambda *_, **__: True)
    monkeypatch.setattr(vllm_engine.os, "O_DIRECTORY", 0)
    made = Leftovers(tmp_path / "place")
    assert any(attempt(made, 0, index).defect == "a pipe was opened" for index in range(100))


def test_an_input_follows_from_seed_and_index(tmp_path: Path) -> None:
    [kind] = [kind for kind in KINDS if kind.name == "actions"]
    first, again, other = (kind(tmp_path).make(generator(kind, 0, index)) for index in (1, 1, 2))
    assert first == again != other
