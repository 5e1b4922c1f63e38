"""Text for a terminal, a log or a report, in which nothing is a command, markup, a reordering or a secret."""

from __future__ import annotations

import re
import unicodedata

CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")  # of an address: user and password
_QUERY = re.compile(r"(://[^?#\s]*)(\?[^#\s]+)?")
_MARKUP = re.compile(r"[\\`|<\[]")  # characters that end a cell, or begin HTML, code, a link or an image


def harmless(text: str) -> str:
    """Text that moves or colours nothing: blanks become a space, control characters U+FFFD, and format ones go."""
    return text if text.isprintable() else "".join(char if char.isprintable() else _replacement(char) for char in text)


def harmless_lines(text: str) -> str:
    """Makes each line `harmless`, and keeps the line breaks."""
    return "\n".join(map(harmless, text.splitlines()))


def in_markdown(text: str) -> str:
    """Makes text `harmless` within a sentence or a table's cell of Markdown, which then shows it unchanged."""
    return _MARKUP.sub(r"\\\g<0>", harmless(text))


def without_password(text: str) -> str:
    """Removes user and password before the host of each address, and its query, where services have their keys too."""
    return _QUERY.sub(lambda match: match[1] + "?..." * bool(match[2]), CREDENTIALS.sub("", text))


def _replacement(char: str) -> str:
    if char.isspace():
        return " "
    return "" if unicodedata.category(char) == "Cf" else "\N{REPLACEMENT CHARACTER}"
