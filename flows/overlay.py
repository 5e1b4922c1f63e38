"""Another scale: `agent-r1 overlay NAME` lays overlays/NAME.yaml over params.yaml, `overlay base` goes back.

DVC reads fixed files, so the composition takes the place of params.yaml, and the base waits in overlays/base.yaml. An
overlay holds differences: mappings are merged key by key, everything else is replaced. `over: [A, B]` are others that
it is laid over, in this order. `places: own` are folders and names of the overlay's own. An overlay of the package need
not be in the project.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML

from agent_r1.facts import differences
from agent_r1.files import write_text
from agent_r1.params import Params
from agent_r1.params.places import PARAMS, UNREAD
from agent_r1.params.sections import bring_up, flatten, nearest, override, validated
from flows.made_of import SHIPPED

FOLDER = Path("overlays")
BASE = FOLDER / "base.yaml"
HEADER = re.compile(rf"# Composed of {BASE} and {FOLDER}/(?P<name>[\w.-]+)\.yaml \((?P<digest>\w+)\).*\n")
# DVC's records of its outputs, and where a scale's wait while another one is laid.
RECORDS = ("dvc.lock", "ablations/dvc.lock")
WAITING = Path(".dvc/tmp/scales")
Load = Callable[[str], Any]  # YAML as it says, or with the comments that `round_trip` keeps


def switch(name: str) -> None:
    """Makes params.yaml the composition of the base and one overlay, or the base itself again.

    DVC's record of the scale that is left waits, and comes back with it. Raises ValueError, and writes nothing, if
    there is no such overlay, its parameters are not valid, or edits of params.yaml under an overlay would be lost.
    """
    base = _base()
    parameters = Path(PARAMS)
    header = HEADER.match(parameters.read_text()) if parameters.exists() else None
    old = header["name"] if header else "base"
    text = base if name == "base" else compose(base, name)
    for record in filter(Path.exists, map(Path, RECORDS)):
        (WAITING / old / record).parent.mkdir(parents=True, exist_ok=True)
        write_text(WAITING / old / record, record.read_text())
    if name != "base":
        write_text(BASE, base)
    write_text(parameters, text)
    if name == "base":
        BASE.unlink(missing_ok=True)
    for record in map(Path, RECORDS):
        waiting = WAITING / name / record
        if name != old and waiting.exists():
            write_text(record, waiting.read_text())


def compose(base: str, name: str) -> str:
    """The text of params.yaml under an overlay, with the comments of the base."""
    path, changes = read_overlay(name, round_trip().load)
    if changes.get("places") == "own":
        changes["places"] = {"scale": name} | {kind: f"scales/{name}/{kind}" for kind in ("data", "outputs")}
    body = laid_over(base, changes, str(path))
    return f"# Composed of {BASE} and {path} ({_digest(body)}); `agent-r1 overlay base` goes back.\n{body}"


def read_overlay(name: str, load: Load) -> tuple[Path, dict[str, Any]]:
    """The file of an overlay, the project's own or the package's, and what it says. ValueError if there is none."""
    path, changes = _read(name, load)
    others = changes.pop("over", [])
    if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
        raise ValueError(f"{path}: over must be a list of overlays, such as [qwen2.5-3b, open]; got {others!r}")
    merged: dict[str, Any] = {}
    for other in others:
        merged = override(merged, _read(other, load)[1])
    return path, override(merged, changes)


def _read(name: str, load: Load) -> tuple[Path, dict[str, Any]]:
    files = _files()
    if name not in files:
        raise ValueError(f"there is no overlay {name!r}{nearest(name, sorted({*files, BASE.stem}))}")
    changes = load(files[name].read_text())
    if not isinstance(changes, dict):
        raise ValueError(f"{files[name]}: expected a mapping of what differs, found {type(changes).__name__}")
    return files[name], changes


def of_models() -> dict[str, Params]:
    """The parameters of each overlay that names a model, by its name."""
    base = yaml.safe_load(_base())
    tuple(bring_up(base))
    overlays = {name: read_overlay(name, yaml.safe_load)[1] for name in sorted(_files())}
    return {
        name: validated(Params, override(base, overlay | {"places": {}}), name)
        for name, overlay in overlays.items()
        if "path" in overlay.get("model", {})
    }


def _files() -> dict[str, Path]:
    """The overlays of the package and the project's own, by name."""
    files = {path.stem: path for folder in (SHIPPED / FOLDER, FOLDER) for path in folder.glob("*.yaml")}
    files.pop(BASE.stem, None)
    return files


def laid_over(base: str, changes: dict[str, Any], where: str) -> str:
    """The text of a params.yaml with changes, with the comments of the base. `places.raw` follows its data sets.

    Raises ValueError with what is refused, after `where`.
    """
    content = round_trip().load(base)
    tuple(bring_up(content))
    content = override(content, changes)
    raw = validated(Params, yaml.safe_load(dumped(content)), where).read_of_raw
    if raw != content["places"].get("raw", UNREAD):
        content["places"]["raw"] = raw
    return dumped(content)


def round_trip() -> YAML:
    """A reader and writer that keeps comments, lines and quotes, and writes null out as the base does."""
    yaml_12 = YAML()
    yaml_12.width = 1 << 16  # no line is broken
    yaml_12.preserve_quotes = True
    yaml_12.indent(mapping=2, sequence=4, offset=2)
    null = "tag:yaml.org,2002:null", "null"
    yaml_12.representer.add_representer(type(None), lambda dumper, _: dumper.represent_scalar(*null))
    return yaml_12


def dumped(content: Any) -> str:
    """The text of what `round_trip` loaded."""
    text = io.StringIO()
    round_trip().dump(content, text)
    return text.getvalue()


def _is_as_composed(text: str) -> bool:
    header = HEADER.match(text)
    return header is not None and _digest(text[header.end() :]) == header["digest"]


def _base() -> str:
    """The text of the base. Raises ValueError if switching would lose an edit."""
    text, waiting = (path.read_bytes().decode() if path.exists() else "" for path in (Path(PARAMS), BASE))
    header = HEADER.match(text)
    if header and not waiting:
        raise ValueError(f"{BASE}, which {PARAMS} was composed of, is gone; put it back, or `git checkout {PARAMS}`")
    if header and not _is_as_composed(text):
        edited = _differences(compose(waiting, header["name"]), text)
        remedy = f"edit {BASE} or the overlay instead, and take it back in {PARAMS}"
        raise ValueError(f"{PARAMS} was edited under an overlay: {edited}; {remedy}")
    if not header and waiting not in ("", text):
        differing = _differences(waiting, text)
        raise ValueError(f"{PARAMS} is no composition, but {BASE} waits: {differing}; remove {BASE} to go on without")
    return waiting or text


def _differences(before: str, after: str) -> str:
    return ", ".join(differences(*(flatten(yaml.safe_load(text)) for text in (before, after)))) or "in comments alone"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
