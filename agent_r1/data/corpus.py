"""Passages to search, from JSON, JSON lines, Parquet or plain text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from agent_r1.data.rows import Row
from agent_r1.data.sources import ROWS, data_files, open_text, read, suffix
from agent_r1.records import Passage

TEXT = ".txt"


def passages(location: Path) -> Iterator[tuple[str, Passage]]:
    """The passages of a file, a folder or a pattern, each with the place it was read from.

    A row has `title` and `text`, and `id` where it has one; without, its content names it. Of a text file every
    paragraph is a passage (blank lines part them), and the file's name the title of all.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: a file or a row is malformed; the message names both.
    """
    for path in data_files(location, (*ROWS, TEXT)):
        if suffix(path) == TEXT:
            yield from _read_text(path)
        else:
            yield from ((str(row), _passage(row)) for row in read(path))


def content_id(title: str, text: str) -> str:
    """The same for the same passage, whichever file it comes from."""
    return hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=8).hexdigest()


def named_by_content(title: str, text: str) -> Passage:
    """A passage that is named by what it says."""
    return Passage(passage_id=content_id(title, text), title=title, text=text)


def _passage(row: Row) -> Passage:
    title, text = row.text("title"), row.text("text").strip()
    if not row.has("id"):
        return named_by_content(title, text)
    return Passage(passage_id=row.id("id"), title=title, text=text)


def _read_text(path: Path) -> Iterator[tuple[str, Passage]]:
    title = path.name.removesuffix(".gz").removesuffix(TEXT)
    with open_text(path) as lines:
        paragraphs = (group for blank, group in groupby(lines, key=lambda line: not line.strip()) if not blank)
        for number, paragraph in enumerate(paragraphs, start=1):
            yield f"{path}, paragraph {number}", named_by_content(title, "".join(paragraph).strip())
