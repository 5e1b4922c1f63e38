"""Traces a model to its data, and data to its models: `agent-r1 lineage MODEL|DATA`.

Reads the records of MLflow's registry and of DVC alone: no model is loaded, and nothing is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from agent_r1 import params
from agent_r1.files import sha256
from agent_r1.params.places import Places, registered_training
from agent_r1.tracking import registry
from agent_r1.tracking.registry import SCHEME, Descriptor, Version
from agent_r1.tracking.runs import git
from flows.dvc_files import kept

UNKNOWN = "not known"
WORKSPACE = ""  # in place of a commit
LOCKS = ("dvc.lock", "ablations/dvc.lock")
CACHE = Path(".dvc/cache/files/md5")
HASH = re.compile(r"[0-9a-f]{6,64}(\.dir)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """An output as a stage made it once."""

    commit: str  # of the dvc.lock that records it; WORKSPACE for the one on disk
    stage: str
    path: str
    md5: str  # DVC's hash of the output
    inputs: dict[str, str]  # path -> md5 of its inputs, code included


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """A version of questions, passages, index, or of several."""

    name: str
    hashes: frozenset[str]  # sha256 of contents or md5 of DVC's; a model trained on the data has them all


def lineage(subject: str, console: Console) -> None:
    """Prints the origins of a model, by reference or label, or the models of data that `data_of` finds."""
    if subject.startswith(SCHEME):
        console.print(_origins(registry.find(subject)))
        return
    known = registry.versions()
    labelled = [version for version in known if subject == version.descriptor.label]
    for version in labelled:
        console.print(_origins(version))
    if not labelled:
        data = data_of(subject, known, params.load().places)
        console.print(_models_of(data, [each for each in known if data.hashes <= _hashes_of(each.descriptor)]))


def _origins(version: Version) -> Tree:
    """A tree with a model above its origins."""
    model = version.descriptor
    training = training_of(model)
    tree = _tree(
        _title(version),
        {
            "policy": [
                ("folder", model.policy),
                ("sha256", model.policy_hash),
                ("updates", str(model.policy_version)),
                ("DVC", f"{model.dvc_file} {model.dvc_hash}" if model.dvc_hash else "has no copy"),
            ],
            "config": [
                ("run", model.run),
                ("seed", str(model.seed)),
                ("sweep", model.sweep or "none"),
                ("fingerprint", model.config),
                ("prompt", model.prompt),
                ("all parameters", f"MLflow run {model.mlflow_run_id}"),
            ],
            "commit": [(model.git_commit or UNKNOWN, "")],
            "data": [
                ("questions", model.questions),
                ("passages", model.passages),
                ("index", model.index),
                ("DVC", model.data_hash or UNKNOWN),
            ],
            "trajectories": trajectory_facts(model, training),
        },
    )
    if training:
        _grow(tree, f"made of, by {training.stage}", sorted(training.inputs.items()))
    return tree


def trajectory_facts(model: Descriptor, training: Origin | None) -> list[tuple[str, str]]:
    """The place of the trajectories that a model learned from, and a command that gets them.

    Uses DVC's file of the training if it is here, beside the policy's; else a folder in a dvc.lock.
    """
    copy, md5 = f"-o trajectories-of-{model.policy_hash[:8]}", model.dvc_training_hash
    file = registered_training(Path(model.dvc_file)) if md5 else Path()
    if md5 and kept(file) == md5:
        found, how = f"{file} {md5}", f"dvc get . {file.with_suffix('')}/trajectories {copy}"
    elif training:
        in_workspace = training.commit == WORKSPACE
        revision = "" if in_workspace else f" --rev {training.commit}"
        found = f"{training.path} {training.md5}, {'workspace' if in_workspace else f'commit {training.commit}'}"
        how = f"dvc get . {training.path}/trajectories{revision} {copy}"
    elif md5:
        found, how = f"{file} {md5}", f"where {file} is: in git, or in the clone that trained it"
    else:
        return [(UNKNOWN, "no dvc.lock here, of the workspace or a commit, names a folder with this policy")]
    return [("DVC", found), ("get them", how)]


def _models_of(data: Data, trained: Sequence[Version]) -> Tree:
    """A tree with data above the models that were trained on it."""
    tree = _tree(data.name, {"hashes": [(each, "") for each in sorted(data.hashes)]})
    below = tree.add(f"{len(trained)} models were trained on it" if trained else "no model was trained on it")
    for version in trained:
        model = version.descriptor
        facts = [("policy", model.policy_hash), ("commit", model.git_commit), ("MLflow run", model.mlflow_run_id)]
        _grow(below, _title(version), facts)
    return tree


def _title(version: Version) -> str:
    aliases = "".join(f" @{alias}" for alias in version.aliases)
    return f"{version.reference}{aliases} {version.descriptor.label}"


def _tree(title: str, branches: Mapping[str, Iterable[tuple[str, str]]]) -> Tree:
    tree = Tree(escape(title))
    for name, facts in branches.items():
        _grow(tree, name, facts)
    return tree


def _grow(tree: Tree, branch: str, facts: Iterable[tuple[str, str]]) -> None:
    grown = tree.add(escape(branch))
    for name, value in facts:
        grown.add(escape(f"{name} {value}".rstrip()), style="default")


def training_of(model: Descriptor) -> Origin | None:
    """The entry of the model's training in a dvc.lock, of the workspace or a commit; None if there is none.

    An entry is the model's if its folder lists the same policy, file by file, as DVC's copy.
    """
    policy, folder = _members(model.dvc_hash), Path(model.policy).parents[1].as_posix()
    inside = f"{Path(model.policy).relative_to(folder).as_posix()}/"
    for lock in LOCKS:
        for commit in (WORKSPACE, *git("log", "--format=%H", "--", lock).split()):
            made = made_in(commit, folder, lock)
            files = _members(made.md5) if made else {}
            found = {name.removeprefix(inside): md5 for name, md5 in files.items() if name.startswith(inside)}
            if policy and policy == found:
                return made
    return None


def made_in(commit: str, path: str, lock: str = LOCKS[0]) -> Origin | None:
    """The output as of a commit; None if its dvc.lock does not know it."""
    for name, stage in _stages(commit, lock).items():
        for out in stage.get("outs", []):
            if out["path"] == path:
                inputs = {each["path"]: each["md5"] for each in stage.get("deps", []) if "md5" in each}
                return Origin(commit=commit, stage=name, path=path, md5=out["md5"], inputs=inputs)
    return None


def _stages(commit: str, lock: str) -> dict[str, Any]:
    if commit == WORKSPACE:
        text = Path(lock).read_text() if Path(lock).exists() else ""
    else:
        text = git("show", f"{commit}:{lock}")
    stages: dict[str, Any] = (yaml.safe_load(text) or {}).get("stages", {})
    return stages


def _members(md5: str) -> dict[str, str]:
    """Path -> md5 of the files of a folder in DVC's cache; empty if the cache has no such folder."""
    listing = CACHE / md5[:2] / md5[2:]
    if not md5 or not listing.exists():
        return {}
    return {entry["relpath"]: entry["md5"] for entry in json.loads(listing.read_text())}


def data_of(subject: str, known: Sequence[Version], places: Places) -> Data:
    """The data at a path, with a hash or the beginning of one, or as of a git revision."""
    if Path(subject).exists():
        return _at(Path(subject), places)
    if HASH.fullmatch(subject) and (data := _hashed(subject, known, places)):
        return data
    if commit := git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{subject}^{{commit}}"):
        return _as_of(commit, subject, places)
    models = ", ".join(version.reference for version in known) or "none is registered"
    labels = ", ".join(sorted({version.descriptor.label for version in known})) or "none"
    versions = ", ".join(sorted({version.descriptor.questions[:12] for version in known})) or "none"
    raise ValueError(
        f"{subject!r} is no model, path, hash of data or git revision here; models: {models}; labels: {labels}; "
        f"questions that models were trained on: {versions}"
    )


def _at(path: Path, places: Places) -> Data:
    hashed = (places.questions, places.passages, places.index)
    below = [each for each in hashed if each.is_relative_to(path) and each.exists()]
    if not below:
        choices = ", ".join(str(each) for each in (places.prepared, *hashed))
        raise ValueError(f"{path} is there, but models are not trained on it; ask for {choices}")
    return Data(name=str(path), hashes=frozenset(sha256(each) for each in below))


def _hashed(start: str, known: Sequence[Version], places: Places) -> Data | None:
    """The data whose hash begins with `start`. Raises ValueError if there are several."""
    every = {each for version in known for each in _hashes_of(version.descriptor)}
    for path in (places.questions, places.passages, places.index):
        every |= {made.md5 for lock in LOCKS if (made := made_in(WORKSPACE, str(path), lock))}
    found = sorted(each for each in every if each.startswith(start))
    if len(found) > 1:
        raise ValueError(f"{start!r} begins several hashes: {', '.join(found)}; give more of it")
    return Data(name=found[0], hashes=frozenset(found)) if found else None


def _hashes_of(model: Descriptor) -> set[str]:
    """All hashes of a model's data."""
    return {model.questions, model.passages, model.index, *model.data_hash.split("+")} - {""}


def _as_of(commit: str, revision: str, places: Places) -> Data:
    made = [made_in(commit, str(path)) for path in (places.passages, places.questions)]
    hashes = frozenset(each.md5 for each in made if each)
    if not hashes:
        raise ValueError(f"the dvc.lock of {revision} knows no prepared data; choose a commit in which it does")
    return Data(name=f"data as of {revision}", hashes=hashes)
