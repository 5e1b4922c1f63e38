"""What a model was made of, and what was made of data: `python -m flows lineage MODEL|DATA`.

From the records of MLflow's registry and of DVC alone: nothing is loaded, and nothing is written.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r1.project import INDEX, PASSAGES, QUESTIONS, kept_training
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from agent_r1.files import sha256
from agent_r1.tracking import registry
from agent_r1.tracking.registry import SCHEME, Descriptor, Version
from flows.dvc_files import LOCKS, WORKSPACE, Made, commit_of, history, kept, made_in, members
from flows.stage import clean_end

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


HASH = re.compile(r"[0-9a-f]{6,64}(\.dir)?")
HASHED = {"questions": QUESTIONS, "passages": PASSAGES, "index": INDEX}  # fields of a descriptor that are data


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """A version of data: of the questions, the passages, the index, or of several."""

    name: str
    hashes: frozenset[str]  # sha256 of contents or md5 of DVC's; a model trained on the data has them all

    def is_of(self, model: Descriptor) -> bool:
        """Whether the model was trained on it."""
        return self.hashes <= hashes_of(model)


def hashes_of(model: Descriptor) -> set[str]:
    """All that the descriptor knows its data by."""
    return {model.questions, model.passages, model.index, *model.data_hash.split("+")} - {""}


def lineage(what: str, console: Console) -> None:
    """Prints the origins of a model, or the models that data led to.

    Args:
        what: a reference or the label of a training; or a path, a hash or its beginning, or a git revision.
        console: where to.

    Raises:
        ValueError: it is nothing of the kind.
    """
    known = registry.versions()
    if what.startswith(SCHEME):
        console.print(_origins(registry.find(what)))
        return
    labelled = [version for version in known if what == version.descriptor.label]
    for version in labelled:
        console.print(_origins(version))
    if not labelled:
        data = data_of(what, known)
        trained = [version for version in known if data.is_of(version.descriptor)]
        console.print(models_of_data(data.name, sorted(data.hashes), trained))


def keeps_training(model: Descriptor) -> bool:
    """Whether DVC's file of the training's folder is here, as it was when the model was registered."""
    return bool(model.dvc_training_hash) and kept(kept_training(Path(model.dvc_file))) == model.dvc_training_hash


def training_of(model: Descriptor) -> Made | None:
    """The training's folder as the run of the model left it, by dvc.lock; None where none tells.

    A folder is that of the model if it lists the same policy, file by file, as DVC's copy of it.
    """
    policy, folder = members(model.dvc_hash), Path(model.policy).parents[1].as_posix()
    inside = Path(model.policy).relative_to(folder).as_posix()
    for made in history(folder):
        files = members(made.md5)
        if policy and policy == {
            name.removeprefix(f"{inside}/"): md5 for name, md5 in files.items() if name.startswith(f"{inside}/")
        }:
            return made
    return None


def _origins(version: Version) -> Tree:
    model = version.descriptor
    return origins(version, training_of(model), kept=keeps_training(model))


def data_of(what: str, known: Sequence[Version]) -> Data:
    """The data that is meant: by a path, by one of its hashes or the beginning of one, or as of a git revision.

    Raises:
        ValueError: it is none of them.
    """
    if Path(what).exists():
        return _at(Path(what))
    if HASH.fullmatch(what) and (data := _hashed(what, known)):
        return data
    if commit := commit_of(what):
        return _as_of(commit, what)
    models = ", ".join(version.reference for version in known) or "none is registered"
    labels = ", ".join(sorted({version.descriptor.label for version in known})) or "none"
    versions = ", ".join(sorted({version.descriptor.questions[:12] for version in known})) or "none"
    raise ValueError(
        f"{what!r} is no model, path, hash of data or git revision here; models: {models}; labels: {labels}; "
        f"questions that models were trained on: {versions}"
    )


def _at(path: Path) -> Data:
    below = [each for each in HASHED.values() if each.is_relative_to(path) and each.exists()]
    if not below:
        choices = ", ".join(str(each) for each in (QUESTIONS.parent, *HASHED.values()))
        raise ValueError(f"{path} is there, but models are not trained on it; ask for {choices}")
    return Data(name=str(path), hashes=frozenset(sha256(each) for each in below))


def _hashed(start: str, known: Sequence[Version]) -> Data | None:
    """The data with the one hash that begins like this.

    Raises:
        ValueError: several begin so.
    """
    every = {each for version in known for each in hashes_of(version.descriptor)}
    every |= {made.md5 for path in HASHED.values() for lock in LOCKS if (made := made_in(WORKSPACE, str(path), lock))}
    found = sorted(each for each in every if each.startswith(start))
    if len(found) > 1:
        raise ValueError(f"{start!r} begins several hashes: {', '.join(found)}; give more of it")
    return Data(name=found[0], hashes=frozenset(found)) if found else None


def _as_of(commit: str, revision: str) -> Data:
    made = [made_in(commit, str(path)) for path in (PASSAGES, QUESTIONS)]
    hashes = frozenset(each.md5 for each in made if each)
    if not hashes:
        raise ValueError(f"the dvc.lock of {revision} knows no prepared data; choose a commit in which it does")
    return Data(name=f"data as of {revision}", hashes=hashes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Shows what a model was made of, or which models data led to.")
    parser.add_argument(
        "what",
        metavar="MODEL|DATA",
        help="models:/agent_r1@champion, models:/agent_r1/3 or a label such as ppo; or a path such as data/prepared, "
        "a hash, a git revision",
    )
    arguments = parser.parse_args()
    with clean_end():
        lineage(arguments.what, Console())


if __name__ == "__main__":
    main()
