"""Another scale: `python -m flows overlay NAME` lays overlays/NAME.yaml over params.yaml, `overlay base` goes back.

DVC reads fixed files, so the composition takes the place of params.yaml, and the base waits in overlays/base.yaml. An
overlay holds what differs: mappings are merged key by key, everything else is replaced.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML

from agent_r1.files import write_text
from agent_r1.params import PARAMS, Params
from agent_r1.params.sections import differences, flatten, nearest, override, validated

FOLDER = Path("overlays")
BASE = FOLDER / "base.yaml"
HEADER = re.compile(rf"# Composed of {BASE} and {FOLDER}/(?P<name>[\w.-]+)\.yaml \((?P<digest>\w+)\).*\n")


def switch(name: str) -> None:
    """Makes params.yaml the composition of the base and one overlay, or the base itself again.

    Raises ValueError if there is no such overlay, it makes no valid parameters, or params.yaml was edited under an
    overlay, which would be lost. Nothing is written then.
    """
    base = _base()
    if name == "base":
        write_text(Path(PARAMS), base)
        BASE.unlink(missing_ok=True)
        return
    composed = compose(base, name)
    write_text(BASE, base)
    write_text(Path(PARAMS), composed)


def compose(base: str, name: str) -> str:
    """The text of params.yaml under an overlay, with the comments of the base."""
    path = FOLDER / f"{name}.yaml"
    known = {each.stem for each in FOLDER.glob("*.yaml")} - {"base"}
    if name not in known:
        raise ValueError(f"there is no overlay {name!r}{nearest(name, sorted(known | {'base'}))}")
    round_trip, text = YAML(), io.StringIO()
    round_trip.width, round_trip.preserve_quotes = 1 << 16, True  # no line is broken
    round_trip.indent(mapping=2, sequence=4, offset=2)
    round_trip.representer.add_representer(type(None), _null)
    changes = round_trip.load(path)
    if not isinstance(changes, dict):
        raise ValueError(f"{path}: expected a mapping of what differs, found {type(changes).__name__}")
    round_trip.dump(override(round_trip.load(base), changes), text)
    body = text.getvalue()
    validated(Params, yaml.safe_load(body), str(path))
    return f"# Composed of {BASE} and {path} ({_digest(body)}); `python -m flows overlay base` goes back.\n{body}"


def _null(representer: Any, _: None) -> Any:
    """Written out, as in the base, where ruamel would leave nothing."""
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _base() -> str:
    """The base as it was; refuses where switching would lose what was edited."""
    found, waiting = (path.read_bytes().decode() if path.exists() else "" for path in (Path(PARAMS), BASE))
    composed = HEADER.match(found)
    if composed and not waiting:
        raise ValueError(f"{BASE}, which {PARAMS} was composed of, is gone; put it back, or `git checkout {PARAMS}`")
    if composed and _digest(found[composed.end() :]) != composed["digest"]:
        edited = _differences(compose(waiting, composed["name"]), found)
        remedy = f"edit {BASE} or the overlay instead, and take it back in {PARAMS}"
        raise ValueError(f"{PARAMS} was edited under an overlay: {edited}; {remedy}")
    if not composed and waiting not in ("", found):
        differing = _differences(waiting, found)
        raise ValueError(f"{PARAMS} is no composition, but {BASE} waits: {differing}; remove {BASE} to go on without")
    return waiting or found


def _differences(before: str, after: str) -> str:
    return ", ".join(differences(*(flatten(yaml.safe_load(text)) for text in (before, after)))) or "in comments alone"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description="Switches params.yaml to another scale, and back.")
    parser.add_argument("name", help="of a file in overlays/, without .yaml; or base")
    switch(parser.parse_args().name)
