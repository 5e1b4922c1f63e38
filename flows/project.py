"""A project of one's own, beside a clone or an installed package: `agent-r1 new project FOLDER`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from agent_r1 import params
from agent_r1.files import replaced_folder, write_text
from agent_r1.params.places import PARAMS
from agent_r1.params.sections import changed, override
from flows.made_of import CODE, SHIPPED
from flows.new import filled
from flows.overlay import BASE, laid_over, read_overlay, round_trip
from flows.package import HASHES, OWN, VERSION, code_hashes, installed, stages

BASES = OWN / "shipped.json"  # the package's files as the project took them: the base of the next merge
COPIES = {
    ".dvcignore": "dvcignore",
    ".dvc/plots.html": "plots.html",
    ".dvc/plots/runs.json": "plots/runs.json",
    "prefect.toml": "prefect.toml",
    "prefect.yaml": "prefect.yaml",
}
GRAPHS = {"dvc.yaml": "pipeline.yaml", "ablations/graph.yaml": "ablations.yaml"}
HEADER = f"""\
# The package's graph, which `agent-r1 update` merges with your edits. A stage depends on the code that it can execute
# by its file in {HASHES}: a hash for each room of the package.
"""
COMMIT = (
    *("-c", "user.name=agent-r1", "-c", "user.email=agent-r1@localhost"),
    *("commit", "--quiet", "--no-verify", "--no-gpg-sign", "--message"),
)


def begin_project(folder: Path, overlay: str = "", assignments: Sequence[str] = ()) -> str:
    """Makes a folder a project with its own git and DVC, under an overlay; returns the next commands.

    `KEY=VALUE` change the overlay. Raises ValueError, and writes nothing, for a folder that is not empty or that lies
    inside of a repository which does not ignore it, and for parameters that are not valid.
    """
    _require_place(folder)
    changes: dict[str, Any] = {}
    if overlay:
        _, differences = read_overlay(overlay, round_trip().load)
        if differences.get("places") == "own":  # as the whole project is
            del differences["places"]
        changes = override({"places": {"scale": overlay}}, differences)
    for assignment in assignments:
        changes = override(changes, changed(assignment))
    files, commands = shipped_files(folder)
    project = files | records(files)
    project[PARAMS] = laid_over(files[PARAMS], changes, overlay or PARAMS) if changes else files[PARAMS]
    with replaced_folder(folder, lasting=False) as fresh:
        for path, text in project.items():
            write_text(fresh / path, text)
        for arguments in (("init", "--quiet"), ("add", "--all"), (*COMMIT, f"Begin with agent_r1 {installed()}")):
            subprocess.run(["git", *arguments], cwd=fresh, check=True)
    return f"wrote {folder}\n\n{commands}"


def _require_place(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is there, and nothing is replaced; name another folder")
    place = folder.absolute()
    above = next(parent for parent in place.parents if parent.is_dir())
    check = subprocess.run(["git", "-C", above, "check-ignore", "--quiet", place], capture_output=True)
    if check.returncode == 1:  # 0 says that it is ignored, 128 that there is no repository
        remedy = f"take a folder beside that, such as ../{place.name}"
        raise ValueError(f"{folder} lies inside of a git repository, which would take it for its own; {remedy}")


def shipped_files(folder: Path) -> tuple[dict[str, str], str]:
    """The files of a project in a folder as the package has them, by their paths, and what is to be typed next."""
    base = CODE / BASE if (CODE / BASE).exists() else params.SHIPPED  # a clone's params.yaml may be a composition
    templates, commands = filled("project", {"name": folder.absolute().name, "folder": str(folder)})
    files = {PARAMS: laid_over(base.read_text(), {}, PARAMS)}
    files |= {path: graph_of((SHIPPED / source).read_text()) for path, source in GRAPHS.items()}
    files |= {path: (SHIPPED / source).read_text() for path, source in COPIES.items()}
    return files | templates, commands


def records(files: Mapping[str, str]) -> dict[str, str]:
    """The files in which a project says what it is of: the package's version, its files, and its code."""
    codes = {str(HASHES / f"{stage}.yaml"): yaml.safe_dump(code_hashes(stage)) for stage in stages()}
    return {str(VERSION): f"{installed()}\n", str(BASES): json.dumps(files, indent=1)} | codes


def graph_of(shipped: str) -> str:
    """The text of a graph in which each stage depends on its file of HASHES in place of files of code."""
    head, *stages = re.split(r"^(?=  \w+:)", re.sub(r"\A(#.*\n)+", HEADER, shipped), flags=re.MULTILINE)
    return head + "".join(map(_with_hashes, stages))


def _with_hashes(stage: str) -> str:
    begin, deps, end = stage.partition("deps: [")
    if not deps:
        return stage
    own = re.sub(r"\s*\b(agent_r1|flows)/[\w./]+,", "", end).lstrip()
    return f"{begin}{deps}{HASHES}/{stage.split(':')[0].strip()}.yaml, {own}"
