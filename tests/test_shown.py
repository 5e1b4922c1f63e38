"""What is shown of a text from outside."""

from __future__ import annotations

import pytest

from agent_r1.shown import without_password


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:secret@host:80/a@b", "http://host:80/a@b"),
        ("no postgresql://me:p@ss@host/db, nor s3://token@bucket", "no postgresql://host/db, nor s3://bucket"),
        ("http://host, mail me@host", "http://host, mail me@host"),
        ("http://host/?to=me@host", "http://host/?to=me@host"),
    ],
)
def test_an_address_is_shown_without_its_password(text: str, shown: str) -> None:
    assert without_password(text) == shown
