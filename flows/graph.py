"""DVC's graphs: their stages, and the outputs of stages that clones bring each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Set
from graphlib import TopologicalSorter
from typing import NamedTuple

from agent_r1 import params
from agent_r1.facts import differences, differing, some
from agent_r1.harmless import harmless
from flows.dvc_files import ask_dvc, complaint, in_dvc, require_listing

_MD5 = re.compile(r"[0-9a-f]{32}(\.dir)?")
# The command, parameters and dependencies of stages from the files that are there; the outputs from dvc.lock.
_DESCRIBE = """
from flatten_dict import flatten
said = {}
for address in sys.argv[1:]:
    [stage] = repo.stage.collect(address)
    stage.deps = [dep for dep in stage.deps if dep.exists]
    stage.save_deps()
    made_of = {"its command": stage.cmd, **{dep.def_path: dep.hash_info.value for dep in stage.deps}}
    flat = flatten(made_of, reducer="dot", keep_empty_types=(dict,))
    outs = {out.def_path: out.hash_info.value or "" for out in stage.outs}
    said[address] = [{name: json.dumps(value) for name, value in flat.items()}, outs]
json.dump(said, sys.stdout)
"""
# Outputs in their place are left alone: DVC refuses to touch them while another stage reads them.
_BRING = """
from dvc_data.hashfile.hash_info import HashInfo
hashes, remote = json.load(sys.stdin), repo.cloud.get_remote_odb()
remote.verify = True
for address in sys.argv[1:]:
    [stage] = repo.stage.collect(address)
    for out in stage.outs:
        out.hash_info = HashInfo("md5", hashes[out.def_path])
    if any(out.workspace_status() for out in stage.outs):
        repo.cloud.pull({one for found in stage.get_used_objs().values() for one in found}, odb=remote)
        stage.checkout()
    if lacking := [str(out) for out in stage.outs if out.workspace_status()]:
        raise ValueError(f"it has other bytes than its hash says, or lacks a file: {', '.join(lacking)}")
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
        nodes = re.findall(r'"([^"]+)"', line)  # a node, or two of an edge
        for node in nodes:
            found.setdefault(node, set()).update(nodes[:-1] if node == nodes[-1] else ())
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


class Described(NamedTuple):
    """A clone's state of a stage."""

    made_of: dict[str, str]  # its command, parameters and the hashes of its dependencies that are there now, by name
    outs: dict[str, str]  # path -> DVC's hash in dvc.lock; "" if the stage is not in it


def described(*stages: str) -> dict[str, Described]:
    """This clone's state of stages. Raises ValueError if its graph cannot be read, or lacks one of them."""
    done = in_dvc(_DESCRIBE, *stages)
    if failed := complaint(done):
        raise ValueError(f"DVC cannot tell of {', '.join(stages)}: {failed}")
    return {stage: Described(*each) for stage, each in json.loads(done.stdout).items()}


def require_alike(stage: str, theirs: Mapping[str, str], ours: Mapping[str, str], but: Iterable[str] = ()) -> None:
    """Raises ValueError with the differences if a stage is made of something else in another clone.

    Dependencies that are, contain, or lie in one of the paths `but` are left out.
    """
    paths = [*but]
    names = [name for name in differing(theirs, ours) if not any(_meet(name, path) for path in paths)]
    if names:
        there, here = ({name: each[name] for name in names if name in each} for each in (theirs, ours))
        raise ValueError(
            f"{stage} is made of something else there than here: {harmless(some(differences(there, here)))}; bring "
            "both clones to the same commit and the same params.yaml"
        )


def bring(known: Mapping[str, Described], hashes: Mapping[str, object]) -> None:
    """Puts the outputs of stages into their places, from DVC's cache or its remote; dvc.lock stays as it is.

    Args:
        known: the stages, as `described` has them.
        hashes: path -> DVC's hash, as another clone says; nothing but this clone's own outputs is looked up in it.

    Raises ValueError if an output has no valid hash, or the listing of a folder is not valid. Raises OSError if the
    remote lacks an output or has another one, or if DVC cannot put it into its place.
    """
    wanted = {path: hashes.get(path) for each in known.values() for path in each.outs}
    for path, md5 in wanted.items():
        if not isinstance(md5, str) or not _MD5.fullmatch(md5):
            said = harmless(f"{md5!r:.80}")
            raise ValueError(
                f"{path} comes with no hash of DVC's but {said}; delete its flow run in Prefect to have it made again"
            )
    listings = [md5 for md5 in map(str, wanted.values()) if md5.endswith(".dir")]
    failed = next(filter(None, map(require_listing, listings)), "")
    if failed := failed or complaint(in_dvc(_BRING, *known, said=json.dumps(wanted))):
        raise OSError(f"{', '.join(wanted)} could not be brought here from DVC's remote ({failed})")


def _meet(one: str, other: str) -> bool:
    """Whether two paths are equal, or one is inside the other."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
