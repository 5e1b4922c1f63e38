"""Facts are compared, shown and stored; a file of another version is refused by the names that differ."""

from pathlib import Path

import pytest

from agent_r1 import facts
from tests.cases import cases


@cases("earlier, later, words")
def test_differences_in_words(earlier: dict[str, object], later: dict[str, object], words: list[str]) -> None:
    assert facts.differences(earlier, later) == words


@cases("content, reason")
def test_what_this_version_did_not_write_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "start.json").write_text(content)
    with pytest.raises(ValueError, match=rf"start\.json is damaged, or of another version of the project: .*{reason}"):
        facts.read(tmp_path / "start.json", ["inputs"])
