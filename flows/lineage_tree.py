"""Lineage as trees on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.markup import escape
from rich.tree import Tree

from agent_r1.tracking.registry import Descriptor, Version
from flows.stored.dvc_records import WORKSPACE, Made
from flows.stored.paths import kept_training

UNKNOWN = "not known"


def origins(version: Version, training: Made | None, *, kept: bool) -> Tree:
    """A model above all that made it.

    Args:
        version: the model.
        training: the folder that its training left, where a dvc.lock tells.
        kept: whether DVC's file of that folder, the one beside the policy's, is here.
    """
    model = version.descriptor
    tree = Tree(escape(_title(version)))
    _grow(tree.add("policy"), policy_facts(model))
    _grow(tree.add("config"), config_facts(model))
    _grow(tree.add("commit"), [(model.git_commit or UNKNOWN, "")])
    _grow(tree.add("data"), data_facts(model))
    _grow(tree.add("trajectories"), trajectory_facts(model, training, kept=kept))
    if training:
        _grow(tree.add(f"made of, by {training.stage}"), sorted(training.inputs.items()))
    return tree


def models_of_data(name: str, hashes: Sequence[str], trained: Sequence[Version]) -> Tree:
    """Data above the models that were trained on it."""
    tree = Tree(escape(name))
    _grow(tree.add("hashes"), [(each, "") for each in hashes])
    below = tree.add(f"{len(trained)} models were trained on it" if trained else "no model was trained on it")
    for version in trained:
        model = version.descriptor
        facts = [("policy", model.policy_hash), ("commit", model.git_commit), ("MLflow run", model.mlflow_run_id)]
        _grow(below.add(escape(_title(version))), facts)
    return tree


def policy_facts(model: Descriptor) -> list[tuple[str, str]]:
    """Where the weights are, and what they are known by."""
    return [
        ("folder", model.policy),
        ("sha256", model.policy_hash),
        ("updates", str(model.policy_version)),
        ("DVC", f"{model.dvc_file} {model.dvc_hash}" if model.dvc_hash else "has no copy"),
    ]


def config_facts(model: Descriptor) -> list[tuple[str, str]]:
    """Under which parameters it was trained."""
    return [
        ("run", model.run),
        ("seed", str(model.seed)),
        ("sweep", model.sweep or "none"),
        ("fingerprint", model.config),
        ("prompt", model.prompt),
        ("all parameters", f"MLflow run {model.mlflow_run_id}"),
    ]


def data_facts(model: Descriptor) -> list[tuple[str, str]]:
    """What it was trained on."""
    return [
        ("questions", model.questions),
        ("passages", model.passages),
        ("index", model.index),
        ("DVC", model.data_hash or UNKNOWN),
    ]


def trajectory_facts(model: Descriptor, training: Made | None, *, kept: bool) -> list[tuple[str, str]]:
    """Where the trajectories are that it learned from, and how to bring them back."""
    file, copy = kept_training(Path(model.dvc_file)), f"-o trajectories-of-{model.policy_hash[:8]}"
    if kept:
        return [
            ("DVC", f"{file} {model.dvc_training_hash}"),
            ("get them", f"dvc get . {file.with_suffix('')}/trajectories {copy}"),
        ]
    if training:
        revision = "" if training.commit == WORKSPACE else f" --rev {training.commit}"
        where = "workspace" if training.commit == WORKSPACE else f"commit {training.commit}"
        return [
            ("DVC", f"{training.path} {training.md5}, {where}"),
            ("get them", f"dvc get . {training.path}/trajectories{revision} {copy}"),
        ]
    if model.dvc_training_hash:
        return [
            ("DVC", f"{file} {model.dvc_training_hash}"),
            ("get them", f"where {file} is: in git, or in the clone that trained it"),
        ]
    return [(UNKNOWN, "no dvc.lock here, of the workspace or a commit, names a folder with this policy")]


def _title(version: Version) -> str:
    aliases = "".join(f" @{alias}" for alias in version.aliases)
    return f"{version.reference}{aliases} {version.descriptor.label}"


def _grow(branch: Tree, facts: Iterable[tuple[str, str]]) -> None:
    for name, value in facts:
        branch.add(escape(f"{name} {value}".rstrip()), style="default")
