"""Another scale: `agent-r1 overlay NAME` lays overlays/NAME.yaml over params.yaml, `overlay base` goes back.

DVC reads fixed files, so the composition takes the place of params.yaml, and the base waits in overlays/base.yaml. With
`--into` the composition goes into a folder instead, and this project does not change. An overlay holds differences:
mappings are merged key by key, everything else is replaced. `places: own` are folders and names of the overlay's own.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from ruamel.yaml import YAML

from agent_r1.facts import differences
from agent_r1.files import write_text
from agent_r1.params import Params
from agent_r1.params.places import PARAMS, UNREAD, tracking_folder
from agent_r1.params.sections import bring_up, changed, flatten, nearest, override, validated

FOLDER = Path("overlays")
BASE = FOLDER / "base.yaml"
HEADER = re.compile(rf"# Composed of {BASE} and {FOLDER}/(?P<name>[\w.-]+)\.yaml \((?P<digest>\w+)\).*\n")
# Links of a project in a folder to this one: the graph, data as it was released, and MLflow's store.
SHARED = ("dvc.yaml", ".dvcignore", "data/raw", ".tracking")
# DVC's records of its outputs, and where a scale's wait while another one is laid.
RECORDS, WAITING = ("dvc.lock", "ablations/dvc.lock"), Path(".dvc/tmp/scales")
# Without git, DVC neither looks into the folder from outside nor minds that git ignores it.
OWN_DVC = "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n"


def switch(name: str) -> None:
    """Makes params.yaml the composition of the base and one overlay, or the base itself again.

    DVC's record of the scale that is left waits, and comes back with it. Raises ValueError, and writes nothing, if
    there is no such overlay, its parameters are not valid, or edits of params.yaml under an overlay would be lost.
    """
    base, found = _base(), Path(PARAMS)
    composed = HEADER.match(found.read_text()) if found.exists() else None
    left, text = composed["name"] if composed else "base", base if name == "base" else compose(base, name)
    for record in filter(Path.exists, map(Path, RECORDS)):
        (WAITING / left / record).parent.mkdir(parents=True, exist_ok=True)
        write_text(WAITING / left / record, record.read_text())
    if name != "base":
        write_text(BASE, base)
    write_text(found, text)
    if name == "base":
        BASE.unlink(missing_ok=True)
    for record in map(Path, RECORDS):
        if name != left and (waits := WAITING / name / record).exists():
            write_text(record, waits.read_text())


def lay_out(name: str, folder: Path, assignments: Sequence[str] = ()) -> None:
    """Makes a folder a project of its own at another scale, or brings it up to date; `KEY=VALUE` change the overlay.

    Its params.yaml is composed, and has a scale for names in MLflow. DVC's record and cache are its own; SHARED and all
    modules, the user's too, are links. Raises ValueError as `switch` does, and for a file in the way of a link.
    """
    composed = compose(_base(), name, own_folder=True, assignments=assignments)
    if (path := folder / PARAMS).exists() and not _is_as_composed(path.read_bytes().decode()):
        raise ValueError(f"{path} was edited; edit {FOLDER}/{name}.yaml instead, and remove {path}")
    tracking_folder().mkdir(exist_ok=True)
    modules = [*Path().glob("*.py"), *(file.parent for file in Path().glob("*/__init__.py"))]
    for shared in (*modules, *map(Path, SHARED)):
        _link(folder / shared, shared)
    _link(folder / "ablations/dvc.yaml", Path("ablations/graph.yaml"))
    if not (config := folder / ".dvc/config").exists():
        write_text(config, OWN_DVC)
    write_text(path, composed)


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and link.resolve() == target.resolve():
        return
    if link.is_symlink() or link.exists():
        raise ValueError(f"{link} is no link to {target}; move it away, or lay the overlay out in another folder")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))


def compose(base: str, name: str, *, own_folder: bool = False, assignments: Sequence[str] = ()) -> str:
    """The text of params.yaml under an overlay, with the comments of the base.

    In a folder of its own its name is that of the scale, and the header names no way back. `places.raw` follows its
    data sets.
    """
    path = FOLDER / f"{name}.yaml"
    known = {each.stem for each in FOLDER.glob("*.yaml")} - {"base"}
    if name not in known:
        raise ValueError(f"there is no overlay {name!r}{nearest(name, sorted(known | {'base'}))}")
    round_trip, text = YAML(), io.StringIO()
    round_trip.width, round_trip.preserve_quotes = 1 << 16, True  # no line is broken
    round_trip.indent(mapping=2, sequence=4, offset=2)
    # Null is written out, as in the base; ruamel would write nothing.
    null = "tag:yaml.org,2002:null", "null"
    round_trip.representer.add_representer(type(None), lambda dumper, _: dumper.represent_scalar(*null))
    changes = round_trip.load(path)
    if not isinstance(changes, dict):
        raise ValueError(f"{path}: expected a mapping of what differs, found {type(changes).__name__}")
    for assignment in assignments:
        changes = override(changes, changed(assignment))
    if own := changes.get("places") == "own":
        changes["places"] = {} if own_folder else {each: f"scales/{name}/{each}" for each in ("data", "outputs")}
    whole = override(round_trip.load(base), {"places": {"scale": name} if own or own_folder else {}})
    tuple(bring_up(whole))
    whole = override(whole, changes)
    round_trip.dump(whole, text)
    read = validated(Params, yaml.safe_load(text.getvalue()), str(path)).read_of_raw
    if read != whole["places"].get("raw", UNREAD):
        whole["places"]["raw"] = read
        round_trip.dump(whole, text := io.StringIO())
    body = text.getvalue()
    hint = f"edit {path}, not this" if own_folder else "`agent-r1 overlay base` goes back"
    return f"# Composed of {BASE} and {path} ({_digest(body)}); {hint}.\n{body}"


def _is_as_composed(text: str) -> bool:
    composed = HEADER.match(text)
    return composed is not None and _digest(text[composed.end() :]) == composed["digest"]


def _base() -> str:
    """The text of the base. Raises ValueError if switching would lose an edit."""
    found, waiting = (path.read_bytes().decode() if path.exists() else "" for path in (Path(PARAMS), BASE))
    composed = HEADER.match(found)
    if composed and not waiting:
        raise ValueError(f"{BASE}, which {PARAMS} was composed of, is gone; put it back, or `git checkout {PARAMS}`")
    if composed and not _is_as_composed(found):
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
