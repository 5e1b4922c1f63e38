"""Brings a project of one's own up to the installed package: `agent-r1 update`."""

from __future__ import annotations

import json
import logging
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from agent_r1.facts import differences, some
from agent_r1.files import replaced_folder, write_text
from agent_r1.params import Params
from agent_r1.params.places import PARAMS
from agent_r1.params.sections import bring_up, changed, flatten, override, validated
from flows.made_of import SHIPPED, read_yaml, value_at
from flows.overlay import BASE, RECORDS, dumped, round_trip
from flows.package import HASHES, NEXT, VERSION, changed_rooms, finish_update, installed, require_not_older
from flows.project import BASES, records, shipped_files

# A line of a section of CHANGELOG.md: a key, perhaps with the value that it is about, and what to do.
KEY = re.compile(r"\| `(?P<key>[\w.*]+)(: (?P<value>[^`]+))?` \| (?P<remedy>.+) \|")
CONFLICT = re.compile(r"^<<<<<<< yours\n(.*?)^=======\n(.*?)^>>>>>>> package\n", re.MULTILINE | re.DOTALL)
BEHIND = """\
So do the stages behind them, where an output differs. Unfinished trainings go on. Of finished ones that would be
trained anew, `agent-r1 keep RUN` accepts one as it is once the project is updated; else it is moved aside, and
`agent-r1 restore RUN` brings it back. Before that `dvc repro index` and `dvc commit --force warm_start` accept a warm
start."""
UNDONE = "Nothing is changed before you say yes, here or by --yes."

logger = logging.getLogger(__name__)


class Update(NamedTuple):
    """The files of a project that an update changes, with their texts, and what it does in words."""

    files: dict[str, str]
    in_words: str


def plan() -> Update:
    """What would bring this project up to the installed package.

    Raises ValueError, and nothing is written, in a folder that is no such project, with an older package, under an
    overlay, with edits that git does not keep yet, and for keys of params.yaml that are unknown or refused.
    """
    outdated = _require_ready()
    shipped, _ = shipped_files(Path.cwd())
    bases = json.loads(BASES.read_text())
    notes = [f"agent_r1 {VERSION.read_text().strip()} -> {installed()}"]
    merged = {path: _merged(path, bases.get(path), text, notes) for path, text in shipped.items()}
    notes += _keys(outdated)
    parameters = _parameters(str(merged[PARAMS]), bases[PARAMS], shipped[PARAMS], notes)
    merged[PARAMS] = parameters
    texts = merged | records(shipped)
    files = {path: text for path, text in texts.items() if text is not None and text != _text(path)}
    if not files:
        return Update(files, "everything is up to date")
    _require_committed([*files])
    notes += [f"writes {path}" for path in files if path in shipped]
    notes += [*_reruns(yaml.safe_load(parameters)), UNDONE]
    return Update(files, "\n".join(notes))


def _require_ready() -> dict[str, Any]:
    """The project's params.yaml. Raises ValueError where nothing can be brought up."""
    if not VERSION.exists():
        remedy = "a clone is brought up by `git pull` (docs/upgrading.md)"
        raise ValueError(f"there is no {VERSION} here: this is no project of `agent-r1 new project`; {remedy}")
    require_not_older()
    if BASE.exists():
        raise ValueError(f"an overlay is laid over {PARAMS}; go back by `agent-r1 overlay base`, and ask again")
    parameters = read_yaml(Path(PARAMS))
    if not isinstance(parameters, dict):
        raise ValueError(f"{PARAMS} cannot be read as YAML; mend it, or `git checkout {PARAMS}`, and ask again")
    return parameters


def _require_committed(paths: Sequence[str]) -> None:
    command = ["git", "status", "--porcelain", "--", *paths]
    edited = subprocess.run(command, capture_output=True, text=True).stdout.split()[1::2]
    if edited:
        raise ValueError(f"{some(edited)}: git does not keep your edits yet; commit them, and ask again")


def take(update: Update) -> None:
    """Puts the files of an update into their places. A kill before all are written changes nothing."""
    with replaced_folder(NEXT) as fresh:
        for path, text in update.files.items():
            write_text(fresh / path, text)
    finish_update()
    logger.info("the project is brought up; look at `git diff`, and commit it")


def _text(path: str) -> str | None:
    return Path(path).read_text() if Path(path).exists() else None


def _merged(path: str, base: str | None, shipped: str, notes: list[str]) -> str | None:
    """The project's file with the package's changes. Of lines that both changed the project's stay, which is said.

    One that was removed stays away, and one of the project's own as it is.
    """
    own_text = _text(path)
    if own_text == base:
        return shipped
    if base is None or own_text is None:
        return own_text
    with TemporaryDirectory() as folder:
        for name, text in {"yours": own_text, "base": base, "package": shipped}.items():
            (Path(folder) / name).write_text(text)
        command = ["git", "merge-file", "-p", "yours", "base", "package"]
        merged = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    for _, lines in CONFLICT.findall(merged):
        notes.append(f"{path}: both changed the same lines, and yours stay; the package has\n{lines.rstrip()}")
    return CONFLICT.sub(r"\1", merged)


def _parameters(merged: str, base: str, shipped: str, notes: list[str]) -> str:
    """A merged params.yaml that is valid: with keys that came, and without those that became constants."""
    content = round_trip().load(merged)
    package = flatten(yaml.safe_load(shipped))
    changes = [f"{PARAMS}: {change}" for change in bring_up(content)]
    lacking = package.keys() - flatten(content).keys() - flatten(yaml.safe_load(base)).keys()
    for key in sorted(lacking):
        content = override(content, changed(f"{key}={json.dumps(package[key])}"))
    notes += changes
    try:
        validated(Params, yaml.safe_load(dumped(content)), PARAMS)
    except ValueError as fault:
        raise ValueError("\n".join([str(fault), *notes[1:], "mend that, commit it, and ask again"])) from None
    return dumped(content) if changes or lacking else merged


def _keys(parameters: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a params.yaml that went or changed their meaning since its version, with the remedy."""
    lines = (SHIPPED / "CHANGELOG.md").read_text().splitlines()
    newer = takewhile(lambda line: line != f"## {VERSION.read_text().strip()}", lines)
    for row in filter(None, map(KEY.fullmatch, newer)):
        values = [str(value) for key, value in flatten(parameters).items() if fnmatchcase(f"{key}.", f"{row['key']}.*")]
        if values and row["value"] in (None, *values):
            yield f"{PARAMS}: {row['key']}: {row['remedy']}"


def _changes(entry: Mapping[str, Any], rooms: Mapping[str, list[str]], parameters: Mapping[str, Any]) -> list[str]:
    """The rooms and parameters of an entry of DVC's record that are others by now."""
    code = [Path(dep["path"]).stem for dep in entry.get("deps", ()) if Path(dep["path"]).parent == HASHES]
    before = entry.get("params", {}).get(PARAMS, {})
    after = {key: value_at(parameters, key) for key in before}
    changes = [room for stage in code for room in rooms.get(stage, ())]
    return changes + differences(flatten(before), flatten(after))


def _reruns(parameters: Mapping[str, Any]) -> Iterator[str]:
    """The stages in DVC's records that would run again, by their reasons."""
    rooms = changed_rooms()
    reasons = defaultdict[str, list[str]](list)
    for record in filter(Path.exists, map(Path, RECORDS)):
        for name, entry in read_yaml(record)["stages"].items():
            if changes := _changes(entry, rooms, parameters):
                reasons[some(changes)].append(name)
    yield from (f"runs again: {some(names)} (changed: {reason})" for reason, names in reasons.items())
    if reasons:
        yield BEHIND
