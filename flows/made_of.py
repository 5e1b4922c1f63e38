"""The parameters, code and data that a stage was made of, so that dvc.lock names no others.

DVC reads and hashes them when the command of a stage has ended, and would record edits that it never saw. So the
command's process notes them before it imports the library, and compares them when its outputs are written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

CODE = Path(__file__).parents[1]  # the root of the code; the project in the current folder may be another
SHIPPED = Path(__file__).with_name(
    "shipped"
)  # what a project of one's own is made from; none of it has a name that DVC looks for
OF_STAGE = "DVC_STAGE"  # set by DVC for its stages: the address of the stage
HASHED_BYTES = 2**16  # the largest file that is read; DVC too knows a file by size, time and inode

logger = logging.getLogger(__name__)


class Edited(ValueError):
    """Something that a stage depends on was edited while the stage ran."""


@cache
def code_at_start() -> dict[Path, str]:
    """The sha256 of every file of the project's code, as it was at the first call."""
    files = [file for room in ("agent_r1", "flows") for file in members(CODE / room)]
    return {file: sha256(file.read_bytes()).hexdigest() for file in files}


def code_of(stage: str) -> dict[str, str]:
    """The sha256 of every code file that a stage depends on, by its path, as this process began with it."""
    defined = read_yaml(CODE / "flows/shipped/pipeline.yaml")["stages"][stage]
    listed = defined.get("do", defined)["deps"]
    rooms = [CODE / path for path in listed if path.startswith(("agent_r1/", "flows/"))]
    files = [file for room in rooms for file in members(room)]
    at_start = code_at_start()
    return {str(file.relative_to(CODE)): at_start.get(file) or sha256(file.read_bytes()).hexdigest() for file in files}


def stage_of(address: str) -> str:
    """The stage of an address: of `ablations/dvc.yaml:train@ppo-0` it is `train`."""
    return address.rpartition(":")[2].partition("@")[0]


@cache
def stage_at_start() -> tuple[list[str], list[str], dict[str, Any]] | None:
    """The parameters and the dependencies of this process's DVC stage, and the state of both at the first call.

    None if DVC did not start this process, or has another command for its stage. Notes the code in any case.
    """
    code_at_start()
    address = os.environ.get(OF_STAGE)
    if not address:
        return None
    arguments = sys.argv[1:]
    for graph in (Path("dvc.yaml"), *sorted(Path().glob("*/dvc.yaml"))):
        stage = value_at(read_yaml(graph), f"stages.{stage_of(address)}") or {}
        stage = stage.get("do", stage)
        words = str(stage.get("cmd")).split()[-len(arguments) :]
        item = {word: value for word, value in zip(words, arguments, strict=False) if word.startswith("${item")}
        if [item.get(word, word) for word in words] == arguments:
            return _noted(stage, item)
    return None


def _noted(stage: dict[str, Any], item: dict[str, str]) -> tuple[list[str], list[str], dict[str, Any]]:
    """The parameters and dependencies of a stage with an item's words in them, and their state now."""
    values = read_yaml(Path("params.yaml"))
    text = json.dumps([stage.get("params", []), stage.get("deps", [])])
    for word, value in item.items():
        text = text.replace(word, value)
    params, deps = json.loads(re.sub(r"\$\{([\w.]+)\}", lambda match: str(value_at(values, match[1])), text))
    deps += [file for entry in params if isinstance(entry, dict) for file in entry]  # parameters of other files
    params = [entry for entry in params if isinstance(entry, str)]
    return params, deps, _parts(params, deps)


def require_unedited() -> None:
    """Raises Edited with the differences if DVC would record this stage as made of something else than it was."""
    from agent_r1.facts import some  # not before the code was noted

    address = os.environ.get(OF_STAGE)
    at_start = stage_at_start()
    if at_start is None:
        if address:
            logger.warning("dvc.yaml has another command for stage %s: edits while it runs are not noticed", address)
        return
    if edits := _edits(*at_start):
        problem = f"edited while stage {address} ran: {some(edits)}; dvc.lock stays as it was"
        remedy = "Take the edits back, and the same command takes a finished training over"
        raise Edited(f"{problem}. {remedy}; else it makes the stage anew")


def _edits(params: list[str], deps: list[str], parts: Mapping[str, Any]) -> list[str]:
    """How parameters and dependencies differ from what they were, but for files that DVC ignores."""
    from agent_r1.facts import differences, differing
    from agent_r1.params.sections import flatten
    from flows.dvc_files import ask_dvc

    before = flatten(parts)
    after = flatten(_parts(params, deps))
    names = differing(before, after)
    ignored = ask_dvc("check-ignore", *names).stdout.splitlines() if names else []
    return [line for name, line in zip(names, differences(before, after), strict=True) if name not in ignored]


def members(path: Path) -> list[Path]:
    """A file, or all files in a folder but Python's compiled ones."""
    paths = path.rglob("*") if path.is_dir() else [path]
    return [file for file in paths if file.is_file() and "__pycache__" not in file.parts]


def _parts(params: list[str], deps: list[str]) -> dict[str, Any]:
    """The values of parameters by their names, and of files by their paths a hash that tells their content."""
    values = read_yaml(Path("params.yaml"))
    parts = {name: value_at(values, name) for name in params}
    for file in (file for path in deps for file in members(Path(path))):
        with suppress(FileNotFoundError):  # another process may be writing beside it
            stat = file.stat()
            large = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}".encode()
            content = large if stat.st_size > HASHED_BYTES else file.read_bytes()
            parts[str(file)] = sha256(content).hexdigest()[:12]
    return parts


def read_yaml(file: Path) -> Any:
    """The content of a YAML file; None if it cannot be read, which others explain."""
    with suppress(OSError, yaml.YAMLError):
        return yaml.load(file.read_bytes(), yaml.CSafeLoader)
    return None


def value_at(values: Any, name: str) -> Any:
    """The value under a name with dots; None if there is none."""
    for key in name.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values
