"""Leads from a model to what made it, and from data to its models, by the registry: `agent-r1 lineage MODEL|DATA`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.markup import escape
from rich.tree import Tree

from agent_r1 import params, tracking
from agent_r1.evaluation.comparison import latest_folder
from agent_r1.evaluation.scores import SUCCESS
from agent_r1.files import sha256
from agent_r1.params.places import SCHEME, Places, registered_training
from agent_r1.tracking import registry
from agent_r1.tracking.runs import CODE_TAG

HASH = re.compile(r"[0-9a-f]{6,64}(\.dir)?")


def trees(subject: str) -> list[Tree]:
    """The origins of a model, by reference or label, or the models of the data that `data_of` gives."""
    settings = params.load()
    if subject.startswith(SCHEME):
        return [_origins(registry.find(subject), settings.places)]
    versions = registry.versions(settings.places.model)
    if models := [version for version in versions if subject == version.descriptor.label]:
        return [_origins(version, settings.places) for version in models]
    name, hashes = data_of(subject, versions, settings.places)
    trained = [version for version in versions if hashes <= _hashes_of(version.descriptor)]
    tree = Tree(escape(name))
    below = tree.add(f"{len(trained)} models were trained on it" if trained else "no model was trained on it")
    for version in trained:
        _grow(below, _title(version), _head(version, settings.places))
    _grow(tree, "hashes", ((value, "") for value in sorted(hashes)))
    return [tree]


def _head(version: registry.Version, places: Places) -> Iterator[tuple[str, str]]:
    """The facts of a model that a reader asks for first."""
    model = version.descriptor
    yield "policy", f"{model.policy_hash}, after {model.policy_version} updates"
    if evaluation := latest_folder(version, places):
        scores = json.loads((evaluation / "scores.json").read_text())
        yield "score", f"{SUCCESS} {scores[SUCCESS]:.3f} on {scores['questions']} questions, in {evaluation}"
    sweep = f", sweep {model.sweep}" if model.sweep else ""
    yield "run", f"{model.run}, seed {model.seed}{sweep}; all parameters in MLflow run {model.mlflow_run_id}"
    yield "commit", model.git_commit or "not known"


def _origins(version: registry.Version, places: Places) -> Tree:
    model = version.descriptor
    tracked = tracking.resume(model.mlflow_run_id)
    code = tracked.tags().get(CODE_TAG, model.code) if tracked else model.code
    copy = f"{model.dvc_file} {model.dvc_hash}" if model.dvc_hash else "has no copy"
    data = {"questions": model.questions, "passages": model.passages, "index": model.index}
    tree = Tree(escape(_title(version)))
    _grow(tree, "", _head(version, places))
    _grow(tree, "files", [("folder", model.policy), ("DVC", copy)])
    _grow(tree, "config", [("fingerprint", model.config), ("prompt", model.prompt), ("code of iterations", code)])
    _grow(tree, "data", [*data.items(), ("DVC", model.data_hash or "not known")])
    _grow(tree, "trajectories", _trajectories(model))
    return tree


def _trajectories(model: registry.Descriptor) -> list[tuple[str, str]]:
    """Where a model's trajectories are, and the command that brings them back."""
    folder = Path(model.policy).parents[1] / "trajectories"
    if not model.dvc_training_hash:
        return [("folder", f"{folder}, while the training is there: DVC keeps no copy")]
    file = registered_training(Path(model.dvc_file))
    copy = f"trajectories-of-{model.policy_hash[:8]}"
    command = f"dvc get . {file.with_suffix('')}/trajectories -o {copy}"
    return [("DVC", f"{file} {model.dvc_training_hash}"), ("get them", command)]


def _title(version: registry.Version) -> str:
    aliases = "".join(f" @{alias}" for alias in version.aliases)
    return f"{version.reference}{aliases} {version.descriptor.label}"


def _grow(tree: Tree, branch: str, facts: Iterable[tuple[str, str]]) -> None:
    grown = tree.add(escape(branch)) if branch else tree
    for name, value in facts:
        grown.add(escape(f"{name} {value}".rstrip()), style="default")


def data_of(subject: str, versions: Sequence[registry.Version], places: Places) -> tuple[str, set[str]]:
    """The name and hashes of data at a path, or of data that a model was trained on, by a hash or its beginning."""
    if Path(subject).exists():
        hashed = (places.questions, places.passages, places.index)
        below = [path for path in hashed if path.is_relative_to(subject) and path.exists()]
        if not below:
            choices = ", ".join(str(path) for path in (places.prepared, *hashed))
            raise ValueError(f"{subject} is there, but models are not trained on it; ask for {choices}")
        return subject, {sha256(path) for path in below}
    hashes = set[str]().union(*(_hashes_of(version.descriptor) for version in versions))
    matches = sorted(value for value in hashes if HASH.fullmatch(subject) and value.startswith(subject))
    if len(matches) > 1:
        raise ValueError(f"{subject!r} begins several hashes: {', '.join(matches)}; give more of it")
    if matches:
        return matches[0], {*matches}
    models = ", ".join(version.reference for version in versions) or "none is registered"
    labels = ", ".join(sorted({version.descriptor.label for version in versions})) or "none"
    questions = ", ".join(sorted({version.descriptor.questions[:12] for version in versions})) or "none"
    choices = f"models: {models}; labels: {labels}; questions that models were trained on: {questions}"
    raise ValueError(f"{subject!r} is no model, path or hash of data here; {choices}")


def _hashes_of(model: registry.Descriptor) -> set[str]:
    return {model.questions, model.passages, model.index, *model.data_hash.split("+")} - {""}
