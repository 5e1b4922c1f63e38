"""One row of a data file: what its fields must be, and which values JSON may bring.

Every fault names file, row, field and what was expected there.
"""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST_ROW = 1 << 23  # characters, or bytes in Parquet; also of a paragraph
_LONGEST_NUMBER = 4300  # digits that Python reads
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a character beyond the first 65,536, as JSON may write it


class BrokenRowError(ValueError):
    """A row that cannot be taken; the message says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read."""

    fields: dict[str, Any]
    path: Path
    number: int  # in its file, from 1

    def __str__(self) -> str:
        return f"{self.path}, row {self.number}"

    def has(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self.fields.get(field) is not None

    def text(self, field: str) -> str:
        """A text that is not empty."""
        value = self.fields.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.fault(field, "must be a text that is not empty")
        return value

    def choice(self, field: str, valid: Sequence[str]) -> str:
        """One of the valid texts."""
        value = self.text(field)
        if value not in valid:
            raise self.fault(field, f"must be one of {', '.join(valid)}")
        return value

    def texts(self, field: str) -> list[str]:
        """Texts, of which the empty ones and repetitions are left out; none where there is no such field."""
        match self.fields.get(field):
            case None:
                return []
            case [*values] if all(isinstance(value, str) for value in values):
                return list(dict.fromkeys(value for value in values if value.strip()))
        raise self.fault(field, "must be a list of texts")

    def id(self, field: str) -> str:
        """A text or a number: some collections number the rows of a release."""
        return str(self.fields[field]) if type(self.fields.get(field)) is int else self.text(field)

    def first(self, *fields: str) -> str:
        """The name of the first of these fields that the row has, or of the first of all."""
        return next((field for field in fields if self.has(field)), fields[0])

    def objects(self, field: str) -> list[dict[str, Any]]:
        """Mappings, at least one."""
        match self.fields.get(field):
            case [_, *_] as values if all(isinstance(value, dict) for value in values):
                return list(values)
        raise self.fault(field, "must be a list of objects that is not empty")

    def pairs(self, field: str, second: str) -> list[tuple[str, Any]]:
        """A title and something else, at least once.

        The releases hold [title, something] lists; Parquet files on the Hub hold {title: [...], `second`: [...]}, or
        objects of title and `second`, or the release's lists as JSON in a text.
        """
        value = self.fields.get(field)
        with contextlib.suppress(ValueError, RecursionError):
            value = decode(value) if isinstance(value, str) else value
        found = _pairs(value, second)
        if not found or not all(isinstance(title, str) for title, _ in found):
            raise self.fault(field, f"must hold [title, {second}] pairs")
        return found

    def fault(self, field: str, expected: str) -> ValueError:
        """The exception for a field that is not what it should be."""
        found = reprlib.repr(self.fields[field])[:80] if field in self.fields else "no such field"
        return ValueError(f"{self}: field {field!r} {expected}, found {found}")


def _pairs(value: Any, second: str) -> list[tuple[Any, Any]]:
    match value:
        case {"title": [*titles]} if isinstance(others := value.get(second), list) and len(others) == len(titles):
            return list(zip(titles, others, strict=True))
        case [*items] if all(isinstance(item, list) and len(item) == 2 for item in items):
            return [(title, other) for title, other in items]
        case [*items] if all(isinstance(item, dict) and second in item for item in items):
            return [(item.get("title"), item[second]) for item in items]
    return []


def _whole_number(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise BrokenRowError(f"a number has {len(digits)} digits")
    return int(digits)


DECODER = json.JSONDecoder(parse_int=_whole_number)


def decode(line: str) -> Any:
    """The value of one JSON text."""
    if len(line) >= LONGEST_ROW:
        raise BrokenRowError(f"longer than {LONGEST_ROW} characters")
    value = DECODER.decode(line)
    refuse_halves(value, line, 0, len(line))
    return value


def refuse_halves(value: Any, text: str, start: int, stop: int) -> None:
    """Raises BrokenRowError if a value of this part of a JSON text is none that UTF-8 can write."""
    if not _HALF.search(text, start, stop):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BrokenRowError(f"holds half of a character ({error.object[error.start]!a})") from None
