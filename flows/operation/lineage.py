"""Leads from a model to what made it, by the registry: `agent-r1 lineage MODEL`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.markup import escape
from rich.tree import Tree

from agent_r1 import params, tracking
from agent_r1.evaluation.comparison import latest_folder
from agent_r1.evaluation.scores import SUCCESS
from agent_r1.params.places import SCHEME, Places, registered_training
from agent_r1.tracking import registry
from agent_r1.tracking.runs import CODE_TAG
from flows.policies import version_of


def lineage(model: str) -> Tree:
    """The origins of a model, by reference or label."""
    settings = params.load()
    version = registry.find(model) if model.startswith(SCHEME) else version_of(model, settings)
    return _origins(version, settings.places)


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
