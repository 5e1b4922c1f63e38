"""What of a text may be shown: in a log, a message, a link or a report."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")


def without_password(text: str) -> str:
    """A text whose addresses name no user and no password before their host."""
    return _CREDENTIALS.sub("", text)
