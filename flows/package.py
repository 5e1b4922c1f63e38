"""The installed package and a project of one's own: which code its graph was brought up to, and an update's last step.

In such a project `dvc.yaml` depends on the files of `.agent_r1/code` in place of files of code. `agent-r1 update` alone
writes them, so that another package runs nothing again before somebody says yes.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from flows.made_of import SHIPPED, code_of, members, read_yaml

OWN = Path(".agent_r1")  # what the package writes into a project, for git to keep
VERSION = OWN / "version"  # of the package that the project was brought up to; without it this is no such project
HASHES = OWN / "code"  # a file a stage, with a hash for each room of the package that it executes
NEXT = OWN / "next"  # files that an update has decided on, on the way to their places
DISTRIBUTION = "agent_r1"


def installed() -> str:
    """The version of the installed package."""
    return version(DISTRIBUTION)


def code_hashes(stage: str) -> dict[str, str]:
    """A hash over the files in each room of the installed package that a stage executes, by the room."""
    from agent_r1.params import fingerprint  # not before the code was noted

    rooms: dict[str, dict[str, str]] = {}
    for file, digest in code_of(stage).items():
        rooms.setdefault("/".join(Path(file).parent.parts[:2]), {})[file] = digest
    return {room: fingerprint(files) for room, files in rooms.items()}


def stages() -> list[str]:
    """The stages of the graph, by the names of their files in HASHES."""
    return [*read_yaml(SHIPPED / "pipeline.yaml")["stages"]]


def changed_rooms(*names: str) -> dict[str, list[str]]:
    """Stage -> the rooms of the installed package that are others than this project's graph was brought up to."""
    changed = {}
    for stage in names or stages():
        recorded = read_yaml(HASHES / f"{stage}.yaml") or {}
        current = code_hashes(stage)
        rooms = sorted(room for room in {*recorded, *current} if recorded.get(room) != current.get(room))
        if rooms:
            changed[stage] = rooms
    return changed


def require_not_older() -> None:
    """Raises ValueError if the installed package is older than the one that this project was brought up to."""
    project = VERSION.read_text().strip()
    if Version(installed()) < Version(project):
        remedy = f"install {project} or a later one; the project stays as it is"
        raise ValueError(f"agent_r1 {installed()} is installed, and this project is one of {project}: {remedy}")


def require_current(*names: str) -> None:
    """Raises ValueError if DVC would take the installed package for the one of this project, for some stages or all."""
    if not VERSION.exists():
        return
    require_not_older()
    if changed := "; ".join(f"{stage} ({', '.join(rooms)})" for stage, rooms in changed_rooms(*names).items()):
        remedy = "`agent-r1 update` says what that changes, and asks"
        raise ValueError(f"another package is installed than this project is of: {changed}; {remedy}")


def finish_update() -> None:
    """Moves the files of a decided update into their places. After a kill meanwhile the next command goes on."""
    for file in members(NEXT):
        place = file.relative_to(NEXT)
        with suppress(FileNotFoundError):  # another command moves it
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)
    shutil.rmtree(NEXT, ignore_errors=True)
