"""Who acts: the policy of a run, a registered one, or any model of a folder or hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agent_r1.params import Params
from agent_r1.project import WARM_START, checkpointed_policy, label, train_dir
from agent_r1.tracking import registry
from agent_r1.tracking.registry import SCHEME, Version
from flows.operation.register import folder_of, progress_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Weights that act, and what is known about them."""

    title: str  # for people
    path: str  # a Hugging Face folder or hub id
    updates: int = 0  # since the warm start
    registered: Version | None = None  # the version that it is, where a reference named it


def trained(settings: Params, run: str, seed: int | None, sweep: str | None) -> Policy:
    """The latest policy of a run.

    Raises:
        ValueError: there is no such run.
        FileNotFoundError: it has no checkpoint.
    """
    settings.run(run, seed, sweep)
    policy = checkpointed_policy(train_dir(run, seed, sweep))
    progress = progress_of(policy)
    if progress is None:
        options = [
            f"--run {run}",
            *([] if seed is None else [f"--seed {seed}"]),
            *([f"--sweep {sweep}"] if sweep else []),
        ]
        raise FileNotFoundError(
            f"there is no checkpoint at {policy.parent}; train it first (`python -m flows.train {' '.join(options)}`)"
        )
    title = f"{label(run, seed)} after {progress['iterations']} iterations"
    return Policy(title=title, path=str(policy), updates=progress["policy_version"])


def warm_start() -> Policy:
    """The model that trainings start from.

    Raises:
        FileNotFoundError: it was not made yet.
    """
    if not WARM_START.is_dir():
        raise FileNotFoundError(
            f"there is no model at {WARM_START}; make it (`dvc repro warm_start`), or name another model"
        )
    return Policy(title="the warm start", path=str(WARM_START))


def named(model: str) -> Policy:
    """A registered policy by its reference, such as `models:/agent_r1@champion`, or any model by folder or hub id.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there is no such version, or its policy has gone.
    """
    if model.startswith(SCHEME):
        version = registry.find(model)
        title = f"version {version.number}, {version.descriptor.label}"
        folder = str(folder_of(version))
        return Policy(title=title, path=folder, updates=version.descriptor.policy_version, registered=version)
    folder_given = Path(model).expanduser()
    if folder_given.is_dir():
        missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder_given / name).exists()]
        if missing:
            raise FileNotFoundError(f"{model} has no {missing[0]}; save a model and its tokenizer into one folder")
        progress = progress_of(folder_given)
        return Policy(title=model, path=str(folder_given), updates=progress["policy_version"] if progress else 0)
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise FileNotFoundError(f"there is no folder {model}; --model takes one, or a hub id such as owner/name")
    return Policy(title=model, path=model)
