"""One HTML file that needs nothing else: no network, no server, no other file.

The content is data and never markup: compressed JSON in a block that no browser executes, from which the script makes
text nodes. The page's own policy (Content Security Policy) allows its one script and its one style, by their hashes,
and no connection to anywhere.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import logging
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain
from typing import Any

from agent_r1.viewer.payload import Payload
from agent_r1.viewer.shown import Decode, Shown

LARGEST_PAGE = 5_000_000  # bytes
SCRIPTS = ("model.js", "tokens.js", "reading.js", "app.js")

logger = logging.getLogger(__name__)


def page(title: str, about: Mapping[str, Any], groups: Sequence[Sequence[Shown]], decode: Decode) -> str:
    """The page of some trajectories.

    Args:
        title: of the page.
        about: what its script is told besides: `facts`, pairs of a label and a text; `weights`, name -> weight of the
            reward's parts; `notes`, sentences about what is shown.
        groups: trajectories that belong together, the most important groups first. The last ones are left out where the
            page would be larger than LARGEST_PAGE bytes.
        decode: gives the text of token ids.
    """
    wanted = len(groups)
    while True:
        text = _page(title, about, groups, decode)
        size = len(text.encode())
        if size <= LARGEST_PAGE or len(groups) <= 1:
            break
        groups = groups[: max(1, int(0.95 * len(groups) * LARGEST_PAGE / size))]
    if len(groups) < wanted:
        logger.warning(
            "%d of %d questions are left out of the page, which would be larger than %.0f MB",
            wanted - len(groups),
            wanted,
            LARGEST_PAGE / 1e6,
        )
    return text


def _page(title: str, about: Mapping[str, Any], groups: Sequence[Sequence[Shown]], decode: Decode) -> str:
    payload = Payload(decode)
    for shown in chain.from_iterable(groups):
        payload.add(shown)
    script, style = "\n".join(map(_file, SCRIPTS)), _file("viewer.css")
    filled = {
        "TITLE": html.escape(title),
        "SCRIPT_HASH": _csp_hash(script),
        "STYLE_HASH": _csp_hash(style),
        "STYLE": style,
        "DATA": packed(payload.content({"title": title, **about})),
        "SCRIPT": script,
    }
    parts = _file("viewer.html").split("@@")  # text, name, text, name, ..., text
    return "".join(filled[part] if place % 2 else part for place, part in enumerate(parts))


def packed(content: Mapping[str, Any]) -> str:
    """JSON, compressed, in letters, digits and +/=, none of which can end the block that they stand in."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _file(name: str) -> str:
    return files("agent_r1.viewer").joinpath(name).read_text(encoding="utf-8")


def _csp_hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
