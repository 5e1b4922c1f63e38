"""DVC's graphs: their stages, and the entries of these stages in dvc.lock, which clones can hand to each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from agent_r1 import params
from agent_r1.harmless import harmless
from flows.dvc_files import ask_dvc, complaint, require_listing, run_dvc

SHOWN = 8  # differences that a message names
# The entry that dvc.lock would have now, without missing dependencies, and the entry that it has.
_DESCRIBE = """
import json, sys
from dvc.repo import Repo, lock_repo
from dvc.stage.serialize import to_single_stage_lockfile
repo, said = Repo(_wait_for_lock=True), {}
try:
    with lock_repo(repo):
        for address in sys.argv[1:]:
            [stage] = repo.stage.collect(address)
            locked = stage.dvcfile.lockfile_contents.get("stages", {}).get(stage.name)
            stage.deps = [dep for dep in stage.deps if dep.exists]
            stage.save_deps()
            made = to_single_stage_lockfile(stage)
            paths = [out["path"] for out in made.pop("outs", [])]
            said[address] = {"made": made, "paths": paths, "locked": locked}
except Exception as fault:
    sys.exit(str(fault) or repr(fault))
json.dump(said, sys.stdout)
"""
_WRITE = """
import json, sys
from dvc.repo import Repo, lock_repo
from dvc.utils.serialize import modify_yaml
repo = Repo(_wait_for_lock=True)
try:
    with lock_repo(repo):
        for address, entry in json.load(sys.stdin).items():
            [stage] = repo.stage.collect(address)
            with modify_yaml(stage.dvcfile.path.removesuffix("yaml") + "lock", fs=repo.fs) as lock:
                lock.setdefault("schema", "2.0")
                lock.setdefault("stages", {})[stage.name] = entry
except Exception as fault:
    sys.exit(str(fault) or repr(fault))
"""


class StageFailed(RuntimeError):
    """A stage ended with an error that it has already explained."""


class StageUnavailable(StageFailed):
    """A stage ended because of a file or a server; the same may work later."""


def stages(file: str) -> dict[str, set[str]]:
    """The stages of a dvc.yaml and their dependencies in other files: stage -> its direct dependencies.

    Raises ValueError if params.yaml or the graph is not valid.
    """
    return edges(_answer("dag", "--dot", file))


def edges(dot: str) -> dict[str, set[str]]:
    """The nodes of a graph in the DOT language, each with its predecessors."""
    found: dict[str, set[str]] = {}
    for line in dot.splitlines():
        match re.findall(r'"([^"]+)"', line):
            case [node]:
                found.setdefault(node, set())
            case [before, after]:
                found.setdefault(before, set())
                found.setdefault(after, set()).add(before)
    return found


def waiting(needs: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """For every stage, all stages that have to wait for its end."""
    behind: dict[str, set[str]] = {stage: set() for stage in needs}
    for stage in reversed([*TopologicalSorter(needs).static_order()]):
        for before in needs[stage]:
            behind[before] |= {stage, *behind[stage]}
    return behind


def out_of_date(*targets: str) -> set[str]:
    """The stages that DVC would run. Raises ValueError if params.yaml or the graph is not valid."""
    return {*json.loads(_answer("status", "--json", *targets))}


def _answer(*arguments: str) -> str:
    params.load()  # checks the names that DVC puts into commands
    done = ask_dvc(*arguments)
    if done.returncode:
        raise ValueError(f"dvc {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Item(_Record):
    """A file or folder as dvc.lock names it."""

    path: Annotated[str, Field(max_length=1024)]
    hash: Literal["md5"] = "md5"
    md5: Annotated[str, Field(pattern=r"^[0-9a-f]{32}(\.dir)?$")]
    size: Annotated[int, Field(ge=0)] = 0
    nfiles: Annotated[int, Field(ge=0)] = 1
    isexec: bool = False


class Made(_Record):
    """The command, dependencies and parameters of a stage."""

    cmd: str
    deps: list[Item] = []
    params: dict[str, dict[str, JsonValue]] = {}


class LockEntry(Made):
    """A stage's whole entry in dvc.lock."""

    outs: Annotated[list[Item], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A clone's state of a stage."""

    made: Made  # from the files that are there now
    paths: list[str]  # of its outputs
    locked: dict[str, Any] | None  # the entry in dvc.lock, which may be older


def described(*stages: str) -> dict[str, Known]:
    """This clone's state of stages. Raises ValueError if its graph cannot be read, or lacks one of them."""
    told = json.loads(_of_dvc(_DESCRIBE, *stages))
    return {
        stage: Known(made=Made.model_validate(each["made"]), paths=each["paths"], locked=each["locked"])
        for stage, each in told.items()
    }


def require_alike(stage: str, theirs: Made, ours: Made, made: Iterable[str] = ()) -> None:
    """Raises ValueError with the differences if a stage is made of something else in another clone.

    Dependencies at the paths `made` are left out, because they are still to come.
    """
    found = [*differences(theirs, ours, [*made])]
    if found:
        further = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ValueError(
            f"{stage} is made of something else here than there: {', '.join(found[:SHOWN])}{further}; bring both "
            "clones to the same commit and the same params.yaml"
        )


def differences(theirs: Made, ours: Made, made: Iterable[str] = ()) -> Iterator[str]:
    """The differences of a stage in two clones, in words, without dependencies at or inside the paths `made`."""
    if theirs.cmd != ours.cmd:
        yield "its command"
    there, here = _flat(theirs.params), _flat(ours.params)
    for name in sorted(there.keys() | here.keys()):
        values = [harmless(f"{values.get(name, 'nothing')!r:.60}") for values in (there, here)]
        if name not in there or name not in here or there[name] != here[name]:
            yield f"{harmless(name)} ({values[0]} there, {values[1]} here)"
    files, own = ({item.path: item.md5 for item in each.deps} for each in (theirs, ours))
    for path in sorted(files.keys() | own.keys()):
        if files.get(path) != own.get(path) and not any(_meet(path, other) for other in made):
            yield harmless(path)


def adopt(entries: Mapping[str, LockEntry]) -> None:
    """Takes over stages from another clone: their entries into dvc.lock, their outputs from the remote.

    Raises ValueError if this clone would make a stage of something else, or if an entry or a listing names a file that
    is no output of its stage. Raises OSError if the remote lacks the outputs, or DVC cannot put them into place.
    """
    known, outs = described(*entries), [out for entry in entries.values() for out in entry.outs]
    for stage, entry in entries.items():
        require_alike(stage, entry, known[stage].made, [out.path for out in outs])
        if (paths := sorted(out.path for out in entry.outs)) != sorted(known[stage].paths):
            raise ValueError(harmless(f"{stage} has the outputs {known[stage].paths}, and another clone says {paths}"))
    new = {stage: said for stage, entry in entries.items() if (said := entry_of(entry)) != known[stage].locked}
    old = entries.keys() - new
    # Outputs in their place are not pulled: DVC refuses to while another stage reads them.
    if wanted := [*new, *(out_of_date(*old) if old else ())]:
        failed = next(filter(None, map(require_listing, (out.md5 for out in outs if out.md5.endswith(".dir")))), "")
        if not failed:
            _of_dvc(_WRITE, said=json.dumps(new))
            failed = run_dvc("pull", *wanted)
        if failed:
            raise OSError(f"{', '.join(wanted)} could not be brought here from DVC's remote ({failed})")


def entry_of(entry: Made) -> dict[str, Any]:
    """An entry in the form of dvc.lock."""
    return entry.model_dump(exclude_unset=True)


def push(*stages: str) -> None:
    """Copies the outputs of stages to DVC's remote. Raises OSError if that fails."""
    if failed := run_dvc("push", *stages):
        raise OSError(f"DVC could not push {', '.join(stages)} ({failed})")


def _flat(values: Mapping[str, JsonValue], before: str = "") -> dict[str, JsonValue]:
    """Parameters by their dotted names."""
    flat: dict[str, JsonValue] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) and value else {f"{before}{name}": value}
    return flat


def _meet(one: str, other: str) -> bool:
    """Whether two paths are equal, or one is inside the other."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _of_dvc(script: str, *arguments: str, said: str = "") -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, input=said, capture_output=True, text=True, check=False)
    if failed := complaint(done):
        raise ValueError(f"DVC cannot tell of {', '.join(arguments) or 'its lock'}: {failed}")
    return done.stdout
