"""Text on its way to a terminal, a log or a report: nothing in it is a command, markup, a reordering or a secret."""

from __future__ import annotations

import re
import unicodedata

_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")
_MARKUP = re.compile(r"[\\`|<\[]")  # what ends a cell, or begins HTML, code, a link or an image


def harmless(text: str) -> str:
    """Text in which nothing moves, colours or reorders what a terminal shows.

    Line breaks and other white space become a space, format characters go, and control characters, whatever their
    sequence says, become U+FFFD.
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else _replacement(char) for char in text)


def harmless_lines(text: str) -> str:
    """As `harmless`, line by line."""
    return "\n".join(map(harmless, text.splitlines()))


def in_markdown(text: str) -> str:
    """As `harmless`, for the middle of a sentence or of a table's cell in Markdown, which shows it as it is."""
    return _MARKUP.sub(r"\\\g<0>", harmless(text))


def without_password(text: str) -> str:
    """A text whose addresses name no user and no password before their host."""
    return _CREDENTIALS.sub("", text)


def _replacement(char: str) -> str:
    if char.isspace():
        return " "
    return "" if unicodedata.category(char) == "Cf" else "\N{REPLACEMENT CHARACTER}"
