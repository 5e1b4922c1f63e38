"""Policies that act, each named by one word: a training, a registered version, or any model from a folder or hub."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from agent_r1.files import model_hash, sha256, write_text
from agent_r1.http.endpoint import Endpoint
from agent_r1.learn import checkpoint
from agent_r1.params import Params
from agent_r1.params.places import MODEL, PARAMS, REPRO, SCHEME, SWEEP, RunId, adapter_in, policy_in
from agent_r1.params.sections import nearest
from agent_r1.rollout.sampling import Beneath, PolicyWeights
from agent_r1.tracking import registry
from flows.dvc_files import recorded_md5, require_listing, restorable, run_dvc

if TYPE_CHECKING:  # slow, and not needed to name a policy
    from agent_r1.rollout.chat import Chat

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Weights that act, and their origin."""

    name: str  # `ppo-seed3`, `agent_r1-v3`, `warm_start`, `owner--name`
    title: str  # for people
    path: str  # a Hugging Face folder or hub id; with `elsewhere` the warm start, in whose tokens limits are counted
    seed: int | None = None  # of its training; None if no stage made it
    updates: int = 0  # since the warm start
    run: RunId | None = None  # the training that made it, if known
    version: registry.Version | None = None  # its registered version, if a reference named it
    remote: tuple[Endpoint, str] | None = None  # a server that has the model, and the model's name there

    @property
    def known_as(self) -> str | None:
        """The path that MLflow shows; None for runs and the warm start, which their parameters describe."""
        if self.version:
            return self.version.reference
        return self.title if self.seed is None else None

    def identity(self) -> str:
        """The hash of its weights, or its title at a server; ValueError if a registered version's have changed."""
        if self.remote:
            return self.title
        digest = model_hash(self.path)
        if self.version and digest != self.version.descriptor.policy_hash:
            raise ValueError(f"{self.path} was changed while {self.version.reference} was evaluated; evaluate it again")
        return digest

    def as_trained(self, settings: Params) -> Params:
        """The settings with the `env` of the run that trained it; unchanged if params.yaml has no such run."""
        return settings.of(self.run) if self.run and self.run.run in settings.runs else settings

    def would_round(self, settings: Params) -> bool:
        """Whether it has adapters that this machine's engines can run, and its merged weights would not be in float32.

        Merged weights in 16 bits lose changes below half a unit in the last place. Merged weights in float32 compute
        the same as the adapters, to rounding, and need no model beneath.
        """
        if settings.engine.kind == "server" or not adapter_in(Path(self.path)).is_dir():
            return False
        import torch  # slow, and not needed to name a policy

        from agent_r1.pretrained import compute_dtype, default_device

        return compute_dtype(settings.model.dtype, default_device()) is not torch.float32

    def chat(self, settings: Params) -> Chat:
        """Its renderer, with its tokenizer; a server's model has those of the warm start.

        Raises ValueError for a model that `agent-r1 doctor model` refuses, unless it was trained here.
        """
        from agent_r1.learn.model import load_tokenizer  # loads torch, too
        from agent_r1.pretrained import end_tokens
        from agent_r1.rollout.chat import Chat
        from agent_r1.training.fitness import require_fit

        if not (self.remote or self.run):
            require_fit(self.path, settings)
        reads = 0 if self.remote else settings.env.max_tokens
        tokenizer = load_tokenizer(self.path, reads, settings.model.template)
        return Chat(tokenizer, end_tokens(self.path))

    def weights(self, settings: Params) -> PolicyWeights:
        """Its weights, for engines of this machine; ValueError for adapters that cannot run."""
        return PolicyWeights(self.path, self.updates, self._beneath(settings))

    def _beneath(self, settings: Params) -> Beneath | None:
        """The model beneath its adapters, None if its own weights run."""
        folder = Path(self.path)
        start = settings.places.warm_start
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
            raise ValueError(f"{lacking}; bring it back (`dvc checkout --force {start}`), or train the run to its end")
        remedy = "bring it back (`dvc checkout --force`), or see model.dtype"
        logger.warning("%s; they are merged and rounded: %s", lacking, remedy)
        return None


def policy_of(settings: Params, word: RunId | str) -> Policy:
    """The policy that a word names; "" is the warm start.

    A training is named by its RunId or label (`ppo-seed3`), which may be that of a sweep's, a registered version by its
    reference (`models:/agent_r1@champion`), and any other model by its folder or hub id. Raises FileNotFoundError if
    there is no such policy, and ValueError if there are two, if there is no such run or version, or if its files have
    changed.
    """
    word = word if isinstance(word, RunId) else RunId.exact(word)
    if isinstance(word, RunId):
        return _of_run(settings, word)
    if not word:
        return _warm_start(settings)
    if word.startswith(SCHEME):
        version = _registered(word, settings)
        return of_descriptor(version.descriptor, version)
    if len(max(word.split("/"), key=len)) > 255:
        raise ValueError(f"{word[:60]!r}... is the name of no policy: a file's has at most 255 characters")
    folder = Path(word).expanduser()
    if "/" not in word and word.partition("-")[0] in settings.runs:
        runs = [RunId.parse(word), RunId.parse(word, SWEEP)]
        existing = [run for run in runs if settings.places.training(run).is_dir()]
        ways = [f"{run.sweep or REPRO}/{word}" for run in existing] + [f"./{word}"] * (folder / "config.json").exists()
        if len(ways) > 1:
            raise ValueError(f"{word} means {len(ways)} policies; name one of them: {', '.join(ways)}")
        if existing or not ways:
            return _of_run(settings, [*existing, *runs][0])
    if folder.is_dir():
        return _of_folder(word, folder)
    if word.startswith((".", "/", "~")) or word.count("/") != 1:
        near = "" if "/" in word else f", or a run{nearest(word, settings.runs)}"
        raise FileNotFoundError(f"there is no folder {word}; name one, or a hub id such as owner/name{near}")
    return Policy(name=plain_name(word), title=word, path=word)


def teacher_of(settings: Params, run: RunId) -> str:
    """A run's `train.reference`, of a registered version its folder; raises as `policy_of`."""
    config = settings.run(run)
    return policy_of(settings, config.reference).path if config.reference_is_registered else config.reference


def policy_at(settings: Params, url: str, model: str) -> Policy:
    """The model with a name at an endpoint."""
    limits = settings.engine.server
    start = _warm_start(settings)
    endpoint = Endpoint(url, timeout_s=limits.timeout_s, retries=limits.retries)
    title = f"{model} at {endpoint.url}"
    return Policy(name=plain_name(model), title=title, path=start.path, remote=(endpoint, model))


def _of_run(settings: Params, run: RunId) -> Policy:
    seed = settings.run(run).seed
    folder = policy_in(settings.places.training(run))
    progress = checkpoint.peek(folder.parent)
    if progress is None:
        training = settings.places.training(run)
        command = f"agent-r1 train {run.word}"
        back = f", or bring the earlier one back (`dvc checkout --force {training}`)" if restorable(training) else ""
        raise FileNotFoundError(f"there is no checkpoint at {folder.parent}; train it first (`{command}`){back}")
    checkpoint.require_whole(folder.parent, checkpoint.POLICY)
    title = f"{run.label} after {progress.iterations} iterations"
    updates = progress.policy_version
    return Policy(name=run.label, title=title, path=str(folder), seed=seed, updates=updates, run=run)


def _warm_start(settings: Params) -> Policy:
    folder = settings.places.warm_start
    if not folder.is_dir():
        back = f"bring it back (`dvc checkout {folder}`)" if restorable(folder) else "make it (`dvc repro warm_start`)"
        remedy = f"{back}, or name another model"
        raise FileNotFoundError(f"there is no model at {folder}; {remedy}")
    return Policy(name=folder.name, title="the warm start", path=str(folder), seed=settings.warm_start.seed)


def of_descriptor(descriptor: registry.Descriptor, version: registry.Version | None = None) -> Policy:
    """The policy of a descriptor, of a version if that is known."""
    return Policy(
        name=version.name if version else descriptor.label,
        title=f"version {version.number}, {descriptor.label}" if version else descriptor.label,
        path=str(folder_of(descriptor, version.reference if version else descriptor.policy_hash[:8])),
        seed=descriptor.seed,
        updates=descriptor.policy_version,
        run=RunId(descriptor.run, descriptor.seed, descriptor.sweep),
        version=version,
    )


def _of_folder(word: str, folder: Path) -> Policy:
    if missing := [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).exists()]:
        raise FileNotFoundError(f"{word} has no {missing[0]}; save a model and its tokenizer into one folder")
    progress = checkpoint.peek(folder.parent)
    if progress:
        checkpoint.require_whole(folder.parent, checkpoint.POLICY)
    return Policy(name=folder.name, title=word, path=str(folder), updates=progress.policy_version if progress else 0)


def plain_name(model: str) -> str:
    """A folder or hub id as a name without slashes."""
    return "--".join(part for part in Path(model).parts if part.strip("/."))


def version_of(word: str, settings: Params) -> registry.Version:
    """The version of a reference or a label; a label means the policy in the training's folder, or else its latest."""
    if word.startswith(SCHEME):
        return _registered(word, settings)
    run = RunId.meant(word)
    versions = registry.versions(settings.places.model)
    policy = policy_in(settings.places.training(run))
    if policy.is_dir():
        content = sha256(policy)
        matches = [version for version in versions if version.descriptor.policy_hash == content]
        missing = f"{word}: the policy in {policy} is not registered; `agent-r1 register {run.word}` does"
    else:
        matches = [
            version
            for version in versions
            if (version.descriptor.label, version.descriptor.sweep) == (run.label, run.sweep)
        ]
        near = (
            nearest(word, [version.descriptor.label for version in versions]) if versions else "; the registry is empty"
        )
        missing = f"there is no registered model {word!r}{near}"
    if not matches:
        raise ValueError(missing)
    return matches[-1]


def _registered(reference: str, settings: Params) -> registry.Version:
    """The version that a reference means; a ValueError refuses one of another scale, whose questions are others."""
    version = registry.find(reference)
    if version.model not in (MODEL, settings.places.model):
        raise ValueError(f"{reference} is of another scale than {PARAMS}; ask in its folder, or under its overlay")
    return version


def folder_of(descriptor: registry.Descriptor, title: str) -> Path:
    """A folder with a version's policy: the training's own, or DVC's copy, brought back; ValueError for neither."""
    if _holds(Path(descriptor.policy), descriptor):
        return Path(descriptor.policy)
    reason = "it was registered outside a DVC project, so there is no copy of it"
    if descriptor.dvc_hash:
        copy = Path(descriptor.dvc_file).with_suffix("")
        reason = "" if _holds(copy, descriptor) else bring_back(Path(descriptor.dvc_file), descriptor.dvc_hash)
        if not reason and _holds(copy, descriptor):
            return copy
        reason = reason or "DVC's copy is another one"
    problem = f"the policy of {title} ({descriptor.label}) has gone: {descriptor.policy} holds another one or none"
    retraining = f"train it again as of commit {descriptor.git_commit or 'unknown'}"
    raise ValueError(
        f"{problem}, and {reason}; {retraining}, or `dvc pull {descriptor.dvc_file}` where a remote has it"
    )


def in_training(version: registry.Version) -> bool:
    """Whether the training's own folder still holds the policy of a version."""
    return _holds(Path(version.descriptor.policy), version.descriptor)


def _holds(folder: Path, descriptor: registry.Descriptor) -> bool:
    return folder.is_dir() and sha256(folder) == descriptor.policy_hash


def bring_back(file: Path, md5: str) -> str:
    """Has DVC restore a .dvc file's folder; returns "" or why not. ValueError if the listing leads out of it."""
    if not Path(".dvc").is_dir():
        return "this project is no DVC repository"
    lacking = require_listing(md5)
    if recorded_md5(file) != md5:
        out = {"md5": md5, "hash": "md5", "path": file.stem}
        write_text(file, yaml.safe_dump({"outs": [out]}, sort_keys=False))
    failed = lacking or (run_dvc("checkout", "--force", str(file)) and run_dvc("pull", "--force", str(file)))
    return f"DVC has no copy ({failed})" if failed else ""
