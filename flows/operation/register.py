"""Registered policies on disk: kept when a training finishes, brought back when a reference to one is resolved.

A training that is repeated overwrites its folder, and one that `dvc repro` did not start is in no dvc.lock. So DVC's
cache gets every registered policy, under a file of DVC's own, models/LABEL-HASH.dvc, and the folder of its training,
under models/LABEL-HASH-training.dvc. Git can keep these files; `dvc push` and `dvc pull` know them like any other.

The content that DVC would put beside the files is not there. A policy's appears when it is brought back, and stays
until somebody removes it: who else is reading it cannot be known.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from agent_r1 import tracking
from agent_r1.hashes import sha256
from agent_r1.params import Params
from agent_r1.params.sections import nearest
from agent_r1.policy.model import load_tokenizer
from agent_r1.project import (
    INDEX,
    PASSAGES,
    QUESTIONS,
    checkpointed_policy,
    kept_policy,
    kept_training,
    label,
    train_dir,
)
from agent_r1.rollout.attempts import asked_attempt
from agent_r1.rollout.chat import Chat
from agent_r1.search.index import describe, open_index
from agent_r1.tables import write_text
from agent_r1.tracking import registry
from agent_r1.tracking.registry import SCHEME, Descriptor, Version
from flows.dvc_files import kept

logger = logging.getLogger(__name__)


def register(
    run: str,
    seed: int | None,
    sweep: str | None,
    *,
    settings: Params,
    fingerprint: str,
    tracked: tracking.Run,
) -> Version:
    """Registers the policy that a training finished with, and has DVC keep it and the training's folder.

    Doing it again changes nothing.

    Raises:
        OSError: DVC could not keep them.
    """
    training = train_dir(run, seed, sweep)
    policy = checkpointed_policy(training)
    policy_hash, tags, progress = sha256(policy), tracked.tags(), progress_of(policy)
    assert progress is not None, "a run that is finished has a checkpoint"
    known = registry.of_policy(policy_hash)
    dvc_file = kept_policy(known.descriptor.label if known else label(run, seed), policy_hash)
    dvc_hash = keep(policy, dvc_file)
    version = registry.register(
        Descriptor(
            label=label(run, seed),
            run=run,
            seed=settings.run(run, seed, sweep).seed,
            sweep=sweep or "",
            mlflow_run_id=tracked.run_id,
            policy=policy.as_posix(),
            policy_hash=policy_hash,
            policy_version=progress["policy_version"],
            dvc_file=dvc_file.as_posix() if dvc_hash else "",
            dvc_hash=dvc_hash,
            git_commit=tags["git_commit"],
            data_hash=tags["data_hash"],
            questions=sha256(QUESTIONS),
            passages=sha256(PASSAGES),
            index=describe(INDEX).index_hash,
            prompt=_prompt_hash(policy, settings),
            config=fingerprint,
            dvc_training_hash=keep(training, kept_training(dvc_file)),
        )
    )
    logger.info("%s is %s", policy, version.reference)
    return version


def push(model: Descriptor) -> None:
    """Copies what DVC keeps of a model to the default remote, where there is one; warns where that fails."""
    if not model.dvc_file or _dvc("remote", "default"):
        return
    files = [model.dvc_file, *([str(kept_training(Path(model.dvc_file)))] if model.dvc_training_hash else [])]
    if failed := _dvc("push", *files):
        logger.warning(
            "%s is registered, but other clones cannot have it yet, DVC could not push it (%s); mend that and run "
            "`dvc push %s`",
            model.label,
            failed,
            " ".join(files),
        )


def progress_of(policy: Path) -> dict[str, int] | None:
    """What the checkpoint around a policy says about it: `iterations`, `policy_version`, ...; None without one."""
    record = policy.parent / "progress.json"
    found: dict[str, int] | None = json.loads(record.read_text()) if record.exists() else None
    return found


def keep(folder: Path, dvc_file: Path) -> str:
    """Puts a folder into DVC's cache and returns DVC's hash of it; "" where the project is no DVC repository.

    Raises:
        OSError: DVC refuses.
    """
    if not Path(".dvc").is_dir():
        return ""
    content = dvc_file.with_suffix("")
    shutil.rmtree(content, ignore_errors=True)
    try:
        shutil.copytree(folder, content, copy_function=_link)
        failed = _dvc("add", str(content))
    finally:
        shutil.rmtree(content, ignore_errors=True)
    if failed:
        raise OSError(
            f"{folder} is trained, but DVC could not keep it ({failed}); mend that and start the training again, which "
            "only registers then"
        )
    return kept(dvc_file)


def version_of(model: str) -> Version:
    """The registered version that is meant: by a reference, or by the label of a training such as `ppo-seed3`.

    A label means the policy that the training's folder holds, or the latest of that label where the folder is gone.

    Raises:
        ValueError: there is no such version, or the policy of the training is not registered.
    """
    if model.startswith(SCHEME):
        return registry.find(model)
    known, policy = registry.versions(), checkpointed_policy(train_dir(model))
    if policy.is_dir():
        content = sha256(policy)
        found = [version for version in known if version.descriptor.policy_hash == content]
    else:
        found = [version for version in known if version.descriptor.label == model and not version.descriptor.sweep]
    if found:
        return found[-1]
    if policy.is_dir():
        raise ValueError(f"{model}: the policy in {policy} is not registered; a training registers when it finishes")
    labels = [version.descriptor.label for version in known]
    raise ValueError(
        f"there is no registered model {model!r}{nearest(model, labels) if labels else '; the registry is empty'}"
    )


def folder_of(version: Version) -> Path:
    """A folder that holds a version's policy: the training's own while it does, else DVC's copy, brought back.

    Raises:
        ValueError: the training's folder holds another policy by now, and there is no copy.
    """
    found = version.descriptor
    if _holds(Path(found.policy), found):
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
    """Whether the training's own folder still holds the policy."""
    return _holds(Path(version.descriptor.policy), version.descriptor)


def _holds(folder: Path, descriptor: Descriptor) -> bool:
    return folder.is_dir() and sha256(folder) == descriptor.policy_hash


def _bring_back(descriptor: Descriptor) -> str:
    """Has DVC restore its copy, from the cache or else from a remote; "" or why it cannot."""
    if not Path(".dvc").is_dir():
        return "this project is no DVC repository"
    file = Path(descriptor.dvc_file)
    if kept(file) != descriptor.dvc_hash:
        out = {"md5": descriptor.dvc_hash, "hash": "md5", "path": file.stem}
        write_text(file, yaml.safe_dump({"outs": [out]}, sort_keys=False))
    if failed := _dvc("checkout", "--force", str(file)) and _dvc("pull", "--force", str(file)):
        return f"DVC has no copy ({failed})"
    return "" if _holds(file.with_suffix(""), descriptor) else "DVC's copy is another one"


def _dvc(*arguments: str) -> str:
    """Runs a command of DVC's; "" or its error, or else the last line of what it says, when it fails."""
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines()
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    return [f"exit code {done.returncode}", *said, *errors][-1]


def _link(source: str, target: str) -> None:
    """A hard link: a training's files are replaced and never written into. A copy where there are no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _prompt_hash(policy: Path, settings: Params) -> str:
    env = asked_attempt("", open_index(settings.search, PASSAGES, INDEX), settings.env).env
    return Chat(load_tokenizer(policy)).prompt_hash(env.system, env.tools)
