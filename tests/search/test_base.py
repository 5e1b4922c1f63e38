from pathlib import Path

import numpy as np
import pytest

from agent_r1.records import Passage
from agent_r1.search import base as module
from agent_r1.search.base import Passages, store


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 2)


@pytest.mark.usefixtures("small_batches")
def test_passages_are_read_by_position(stored: Path, tmp_path: Path, passages: list[Passage]) -> None:
    assert store(stored, tmp_path / "passages.arrow") == 5
    mapped = Passages(tmp_path / "passages.arrow")
    assert mapped.at(np.arange(5)) == passages
    assert mapped.at(np.array([4, 0, 2, 0])) == [passages[i] for i in (4, 0, 2, 0)]
    assert mapped.at(np.array([], np.int64)) == []
