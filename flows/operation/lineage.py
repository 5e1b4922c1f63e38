"""Traces a model to its data and back, by the records of MLflow and DVC alone: `agent-r1 lineage MODEL|DATA`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.markup import escape
from rich.tree import Tree

from agent_r1 import params, tracking
from agent_r1.evaluation.comparison import latest_folder
from agent_r1.evaluation.scores import SUCCESS
from agent_r1.files import sha256
from agent_r1.params.places import SCHEME, Places, registered_training
from agent_r1.tracking import registry
from agent_r1.tracking.runs import CODE_TAG, git
from flows.dvc_files import kept
from flows.overlay import RECORDS

WORKSPACE = ""  # in place of a commit
CACHE = Path(".dvc/cache/files/md5")
CODE = ("agent_r1/", "flows/")
HASH = re.compile(r"[0-9a-f]{6,64}(\.dir)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """An output as a stage made it once."""

    commit: str  # of the dvc.lock that records it; WORKSPACE for the one on disk
    stage: str
    path: str
    md5: str  # DVC's hash of the output
    inputs: dict[str, str]  # path -> md5 of its inputs, code included


def lineage(subject: str) -> list[Tree]:
    """The origins of a model, by reference or label, or the models of data that `data_of` finds."""
    settings = params.load()
    if subject.startswith(SCHEME):
        return [_origins(registry.find(subject), settings.places)]
    known = registry.versions(settings.places.model)
    if models := [each for each in known if subject == each.descriptor.label]:
        return [_origins(each, settings.places) for each in models]
    name, hashes = data_of(subject, known, settings.places)
    trained = [each for each in known if hashes <= _hashes_of(each.descriptor)]
    tree = Tree(escape(name))
    below = tree.add(f"{len(trained)} models were trained on it" if trained else "no model was trained on it")
    for version in trained:
        _grow(below, _title(version), _head(version, settings.places))
    _grow(tree, "hashes", ((each, "") for each in sorted(hashes)))
    return [tree]


def _head(version: registry.Version, places: Places) -> Iterator[tuple[str, str]]:
    """The facts of a model that a reader asks for first."""
    model, evaluated = version.descriptor, latest_folder(version, places)
    yield "policy", f"{model.policy_hash}, after {model.policy_version} updates"
    if evaluated:
        found = json.loads((evaluated / "scores.json").read_text())
        yield "score", f"{SUCCESS} {found[SUCCESS]:.3f} on {found['questions']} questions, in {evaluated}"
    sweep = f", sweep {model.sweep}" if model.sweep else ""
    yield "run", f"{model.run}, seed {model.seed}{sweep}; all parameters in MLflow run {model.mlflow_run_id}"
    yield "commit", model.git_commit or "not known"


def _origins(version: registry.Version, places: Places) -> Tree:
    model = version.descriptor
    tree, training = Tree(escape(_title(version))), training_of(model)
    _grow(tree, "", _head(version, places))
    copy = f"{model.dvc_file} {model.dvc_hash}" if model.dvc_hash else "has no copy"
    data = {"questions": model.questions, "passages": model.passages, "index": model.index}
    _grow(tree, "files", [("folder", model.policy), ("DVC", copy)])
    tracked = tracking.resume(model.mlflow_run_id)
    code = tracked.tags().get(CODE_TAG, model.code) if tracked else model.code
    _grow(tree, "config", [("fingerprint", model.config), ("prompt", model.prompt), ("code of iterations", code)])
    _grow(tree, "data", [*data.items(), ("DVC", model.data_hash or "not known")])
    _grow(tree, "trajectories", trajectory_facts(model, training))
    if training:
        made = sorted((path, md5) for path, md5 in training.inputs.items() if not path.startswith(CODE))
        lock = f"see dvc.lock of {f'commit {training.commit}' if training.commit else 'the workspace'}"
        code = f"{len(training.inputs) - len(made)} files and folders of code, that trained it or was accepted,"
        _grow(tree, f"made of, by {training.stage}", [*made, (code, lock)])
    return tree


def trajectory_facts(model: registry.Descriptor, training: Origin | None) -> list[tuple[str, str]]:
    """Where a model's trajectories are, by DVC's file of its training or a dvc.lock, and how to get them."""
    copy, md5 = f"-o trajectories-of-{model.policy_hash[:8]}", model.dvc_training_hash
    file = registered_training(Path(model.dvc_file)) if md5 else Path()
    if md5 and kept(file) == md5:
        found, how = f"{file} {md5}", f"dvc get . {file.with_suffix('')}/trajectories {copy}"
    elif training:
        commit = training.commit
        found = f"{training.path} {training.md5}, {f'commit {commit}' if commit else 'workspace'}"
        how = f"dvc get . {training.path}/trajectories{f' --rev {commit}' if commit else ''} {copy}"
    elif md5:
        found, how = f"{file} {md5}", f"where {file} is: in git, or in the clone that trained it"
    else:
        return [("not known", "no dvc.lock here, of the workspace or a commit, names a folder with this policy")]
    return [("DVC", found), ("get them", how)]


def _title(version: registry.Version) -> str:
    aliases = "".join(f" @{alias}" for alias in version.aliases)
    return f"{version.reference}{aliases} {version.descriptor.label}"


def _grow(tree: Tree, branch: str, facts: Iterable[tuple[str, str]]) -> None:
    grown = tree.add(escape(branch)) if branch else tree
    for name, value in facts:
        grown.add(escape(f"{name} {value}".rstrip()), style="default")


def training_of(model: registry.Descriptor) -> Origin | None:
    """The entry of a dvc.lock, here or of a commit, whose folder lists the model's policy file by file; or None."""
    policy, folder = _members(model.dvc_hash), Path(model.policy).parents[1].as_posix()
    inside = f"{Path(model.policy).relative_to(folder).as_posix()}/"
    for lock in RECORDS if policy else ():
        for commit in (WORKSPACE, *git("log", "--format=%H", "--", lock).split()):
            made = made_in(commit, folder, lock)
            files = _members(made.md5) if made else {}
            if policy == {name.removeprefix(inside): files[name] for name in files if name.startswith(inside)}:
                return made
    return None


def made_in(commit: str, path: str, lock: str = RECORDS[0]) -> Origin | None:
    """The output as of a commit; None if its dvc.lock does not know it."""
    text = git("show", f"{commit}:{lock}") if commit else Path(lock).read_text() if Path(lock).exists() else ""
    for name, stage in (yaml.safe_load(text) or {}).get("stages", {}).items():
        for out in stage.get("outs", []):
            if out["path"] == path:
                inputs = {each["path"]: each["md5"] for each in stage.get("deps", []) if "md5" in each}
                return Origin(commit=commit, stage=name, path=path, md5=out["md5"], inputs=inputs)
    return None


def _members(md5: str) -> dict[str, str]:
    """Path -> md5 of the files of a folder in DVC's cache; empty if the cache has no such folder."""
    listing = CACHE / md5[:2] / md5[2:]
    if not md5 or not listing.exists():
        return {}
    return {entry["relpath"]: entry["md5"] for entry in json.loads(listing.read_text())}


def data_of(subject: str, known: Sequence[registry.Version], places: Places) -> tuple[str, set[str]]:
    """The name and hashes (sha256 or md5) of data at a path, by a hash or its beginning, or as of a git revision."""
    hashed = (places.questions, places.passages, places.index)
    if Path(subject).exists():
        below = [each for each in hashed if each.is_relative_to(subject) and each.exists()]
        if not below:
            choices = ", ".join(str(each) for each in (places.prepared, *hashed))
            raise ValueError(f"{subject} is there, but models are not trained on it; ask for {choices}")
        return subject, {sha256(each) for each in below}
    if HASH.fullmatch(subject):
        locked = {made.md5 for path in hashed for lock in RECORDS if (made := made_in(WORKSPACE, str(path), lock))}
        every = locked.union(*(_hashes_of(version.descriptor) for version in known))
        found = sorted(each for each in every if each.startswith(subject))
        if len(found) > 1:
            raise ValueError(f"{subject!r} begins several hashes: {', '.join(found)}; give more of it")
        if found:
            return found[0], {*found}
    if commit := git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{subject}^{{commit}}"):
        hashes = {made.md5 for path in hashed[:2] if (made := made_in(commit, str(path)))}
        if not hashes:
            raise ValueError(f"the dvc.lock of {subject} knows no prepared data; choose a commit in which it does")
        return f"data as of {subject}", hashes
    models = ", ".join(version.reference for version in known) or "none is registered"
    labels = ", ".join(sorted({version.descriptor.label for version in known})) or "none"
    versions = ", ".join(sorted({version.descriptor.questions[:12] for version in known})) or "none"
    known_as = f"models: {models}; labels: {labels}; questions that models were trained on: {versions}"
    raise ValueError(f"{subject!r} is no model, path, hash of data or git revision here; {known_as}")


def _hashes_of(model: registry.Descriptor) -> set[str]:
    return {model.questions, model.passages, model.index, *model.data_hash.split("+")} - {""}
