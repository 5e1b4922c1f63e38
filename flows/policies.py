"""Policies that act: of a run, the warm start, a registered version, or any model from a folder or hub."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import yaml

from agent_r1.files import sha256, write_text
from agent_r1.learn import checkpoint
from agent_r1.params import Params
from agent_r1.params.places import RunId, adapter_in, policy_in
from agent_r1.params.sections import nearest
from agent_r1.rollout.sampling import Beneath
from agent_r1.tracking import registry
from agent_r1.tracking.registry import SCHEME, Descriptor, Version
from flows.dvc_files import kept, require_listing, run_dvc

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Weights that act, and their origin."""

    title: str  # for people
    path: str  # a Hugging Face folder or hub id
    updates: int = 0  # since the warm start
    run: RunId | None = None  # the training that made it, if known
    version: Version | None = None  # its registered version, if a reference named it

    @classmethod
    def of_run(cls, settings: Params, run: RunId) -> Policy:
        """The latest policy of a run.

        Raises FileNotFoundError if there is none, and ValueError if its files have changed.
        """
        settings.run(run)
        folder = policy_in(settings.places.training(run))
        progress = checkpoint.peek(folder.parent)
        if progress is None:
            command = f"agent-r1 train {' '.join(run.words)}"
            raise FileNotFoundError(f"there is no checkpoint at {folder.parent}; train it first (`{command}`)")
        checkpoint.require_whole(folder.parent, checkpoint.POLICY)
        title = f"{run.label} after {progress.iterations} iterations"
        return cls(title=title, path=str(folder), updates=progress.policy_version, run=run)

    @classmethod
    def of_warm_start(cls, settings: Params) -> Policy:
        """The model that trainings start from."""
        folder = settings.places.warm_start
        if not folder.is_dir():
            remedy = "make it (`dvc repro warm_start`), or name another model"
            raise FileNotFoundError(f"there is no model at {folder}; {remedy}")
        return cls(title="the warm start", path=str(folder))

    @classmethod
    def named(cls, model: str) -> Policy:
        """A registered policy by its reference, such as `models:/agent_r1@champion`, or a model by folder or hub id.

        Raises FileNotFoundError if there is no such folder. Raises ValueError if there is no such version, if its
        policy has gone, or if the files of a checkpoint have changed.
        """
        if model.startswith(SCHEME):
            version = registry.find(model)
            title = f"version {version.number}, {version.descriptor.label}"
            made = version.descriptor
            run, updates = RunId(made.run, made.seed, made.sweep), made.policy_version
            return cls(title=title, path=str(folder_of(version)), updates=updates, run=run, version=version)
        folder = Path(model).expanduser()
        if folder.is_dir():
            missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).exists()]
            if missing:
                raise FileNotFoundError(f"{model} has no {missing[0]}; save a model and its tokenizer into one folder")
            progress = checkpoint.peek(folder.parent)
            if progress:
                checkpoint.require_whole(folder.parent, checkpoint.POLICY)
            return cls(title=model, path=str(folder), updates=progress.policy_version if progress else 0)
        if model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise FileNotFoundError(f"there is no folder {model}; --model takes one, or a hub id such as owner/name")
        return cls(title=model, path=model)

    @property
    def name(self) -> str:
        """A short name, such as `agent_r1-v3`, `ppo-seed3`, `warm_start`, `owner--name`."""
        if self.version:
            return self.version.name
        folder = Path(self.path)
        return self.run.label if self.run else folder.name if folder.is_dir() else plain_name(self.path)

    def as_trained(self, settings: Params) -> Params:
        """The settings with the `env` of the run that trained it; unchanged if params.yaml has no such run."""
        return settings.of(self.run) if self.run and self.run.run in settings.runs else settings

    def would_round(self, settings: Params) -> bool:
        """Whether it has adapters that this machine's engines can run, and its merged weights would be in bfloat16.

        Merged weights in bfloat16 lose changes below half a unit in the last place. Merged weights in float32 compute
        the same as the adapters, to rounding, and need no model beneath.
        """
        if settings.engine.kind == "server" or not adapter_in(Path(self.path)).is_dir():
            return False
        import torch  # slow, and not needed to name a policy

        from agent_r1.pretrained import compute_dtype, default_device

        return compute_dtype(settings.model.dtype, default_device()) is torch.bfloat16

    def beneath(self, settings: Params) -> Beneath | None:
        """The model that its adapters run on top of, which trainings start from; None if its own weights run.

        Raises ValueError if there are adapters alone and they cannot run, or if no training wrote them.
        """
        folder, start = Path(self.path), settings.places.warm_start
        alone = checkpoint.is_adapters_alone(folder)
        if not alone and not self.would_round(settings):
            return None
        from agent_r1.learn import adapter

        stored = adapter.read_stored(folder)
        if stored is None:
            return None
        if alone and settings.engine.kind == "server":
            raise ValueError(f"{folder} holds adapters alone, and servers need weights; train the run to its end")
        if start.is_dir() and sha256(start) == stored.beneath:
            adapter.require_fit(stored, folder, start)
            return Beneath(str(start), stored.params.rank)
        lacking = f"{start} is not the model that the adapters in {folder} were trained beside"
        if alone:
            raise ValueError(f"{lacking}; bring it back (`dvc checkout`), or train the run to its end")
        logger.warning("%s; they are merged and rounded: bring it back (`dvc checkout`), or see model.dtype", lacking)
        return None


def plain_name(model: str) -> str:
    """A folder or hub id as a name without slashes."""
    return "--".join(part for part in Path(model).parts if part.strip("/."))


def chosen(settings: Params, run: RunId | None, model: str | None) -> Policy:
    """The policy of a training or of a model; the warm start if neither is named. Raises ValueError for both."""
    if run and model:
        raise ValueError("--run and --model each name a policy; give one of them")
    if run:
        return Policy.of_run(settings, run)
    return Policy.named(model) if model else Policy.of_warm_start(settings)


def version_of(model: str, settings: Params) -> Version:
    """The registered version with a reference, or with the label of a training such as `ppo-seed3`.

    A label means the policy in the training's folder, or the latest version of that label if the folder is gone.
    """
    if model.startswith(SCHEME):
        return registry.find(model)
    known, policy = registry.versions(), policy_in(settings.places.training(RunId.parse(model)))
    if policy.is_dir():
        content = sha256(policy)
        found = [version for version in known if version.descriptor.policy_hash == content]
    else:
        found = [version for version in known if version.descriptor.label == model and not version.descriptor.sweep]
    if found:
        return found[-1]
    if policy.is_dir():
        words = " ".join(RunId.parse(model).words)
        raise ValueError(f"{model}: the policy in {policy} is not registered; `agent-r1 register {words}` does")
    labels = [version.descriptor.label for version in known]
    found_none = nearest(model, labels) if labels else "; the registry is empty"
    raise ValueError(f"there is no registered model {model!r}{found_none}")


def folder_of(version: Version) -> Path:
    """A folder that holds a version's policy: the training's own, or else DVC's copy, which is brought back.

    Raises ValueError if the training's folder holds another policy, and there is no copy.
    """
    found = version.descriptor
    if in_training(version):
        return Path(found.policy)
    reason = "it was registered outside a DVC project, so there is no copy of it"
    if found.dvc_hash:
        copy = Path(found.dvc_file).with_suffix("")
        reason = "" if _holds(copy, found) else _bring_back(found)
        if not reason:
            return copy
    raise ValueError(
        f"the policy of {version.reference} ({found.label}) has gone: {found.policy} holds another one or none, and "
        f"{reason}; train it again as of commit {found.git_commit or 'unknown'}, or `dvc pull {found.dvc_file}` where "
        "a remote has it"
    )


def in_training(version: Version) -> bool:
    """Whether the training's own folder still holds the policy of a version."""
    return _holds(Path(version.descriptor.policy), version.descriptor)


def _holds(folder: Path, descriptor: Descriptor) -> bool:
    return folder.is_dir() and sha256(folder) == descriptor.policy_hash


def _bring_back(descriptor: Descriptor) -> str:
    """Has DVC restore its copy from the cache or a remote; returns "", or why it cannot.

    Raises ValueError if the listing that DVC would follow leads out of the copy's folder.
    """
    if not Path(".dvc").is_dir():
        return "this project is no DVC repository"
    file, lacking = Path(descriptor.dvc_file), require_listing(descriptor.dvc_hash)
    if kept(file) != descriptor.dvc_hash:
        out = {"md5": descriptor.dvc_hash, "hash": "md5", "path": file.stem}
        write_text(file, yaml.safe_dump({"outs": [out]}, sort_keys=False))
    if failed := lacking or (run_dvc("checkout", "--force", str(file)) and run_dvc("pull", "--force", str(file))):
        return f"DVC has no copy ({failed})"
    return "" if _holds(file.with_suffix(""), descriptor) else "DVC's copy is another one"
