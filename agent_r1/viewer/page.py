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
            page would be larger than LARGEST_PAGE bytes, and a note says how many trajectories are there.
        decode: gives the text of token ids.
    """
    payload = Payload(decode)
    for group in groups:
        payload.add(group)
    text = _page(title, payload.content({"title": title, **about}, len(groups)))
    count = len(groups)
    while (size := len(text.encode())) > LARGEST_PAGE and count > 1:
        count = max(1, int(0.95 * count * LARGEST_PAGE / size))
        cut = _left_out(payload.episodes(count), payload.episodes(len(groups)))
        text = _page(title, payload.content({"title": title, **about, "notes": [*about["notes"], cut]}, count))
    if count < len(groups):
        logger.warning("%s", cut)
    return text


def _left_out(shown: int, wanted: int) -> str:
    return (
        f"{shown} of {wanted} trajectories are shown; the rest would make the page larger than "
        f"{LARGEST_PAGE / 1e6:.0f} MB."
    )


def _page(title: str, content: Mapping[str, Any]) -> str:
    script, style = "\n".join(map(_file, SCRIPTS)), _file("viewer.css")
    filled = {
        "TITLE": html.escape(title),
        "SCRIPT_HASH": _csp_hash(script),
        "STYLE_HASH": _csp_hash(style),
        "STYLE": style,
        "DATA": packed(content),
        "SCRIPT": script,
    }
    parts = _file("viewer.html").split("@@")  # text, name, text, name, ..., text
    return "".join(filled[part] if place % 2 else part for place, part in enumerate(parts))


def packed(content: Mapping[str, Any]) -> str:
    """JSON, compressed, in letters, digits and +/=, none of which can end the block that they stand in."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _file(name: str) -> str:
    return files("agent_r1.viewer").joinpath(name).read_text(encoding="utf-8")


def _csp_hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
