"""Checkpoints: everything that a killed training run needs to go on with the same bits.

A checkpoint is a folder: `policy/`, an ordinary Hugging Face folder; `learner/`, the critic, both optimisers and the
random states, written by `agent_r1.devices.sharing`; `progress.json`; and `SHA256SUMS`, the hashes of all files for
`sha256sum -c`. Adapters that train are in `policy/adapter/`, and merged weights may be missing until the training ends.
One learner at a time may write it. `learner/` may be removed when nothing is left to train.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from agent_r1.files import SUMS, clear_leftovers, read_sums, replaced_folder, sha256, write_sums
from agent_r1.params.places import adapter_in

if TYPE_CHECKING:  # readers of a checkpoint's progress depend on no learner
    from agent_r1.learn.learner import Learner
    from agent_r1.params.train import TrainParams

POLICY = "policy"
LEARNER = "learner"
PROGRESS = "progress.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of a training run at a checkpoint."""

    iterations: int  # finished ones, and so the index of the next
    policy_version: int  # updates of the policy's weights since the warm start
    rollbacks: int = 0  # times the run went back to an earlier checkpoint
    stopped: bool = False  # whether the run was ended before its last iteration
    code: list[tuple[int, str]] = field(default_factory=list)  # (first iteration, digest) of the code that trained it
    machines: list[tuple[int, str]] = field(default_factory=list)  # (first iteration, machine) where it was trained
    policy_from: int | None = None  # the first iteration after the critic's warm-up; None before
    accepted: str = ""  # digest of other code under which the complete run was accepted as it is
    changes: list[str] = field(default_factory=list)  # of settings in words, with the first iteration under each
    decays_over: int | None = None  # iterations of the rates' decay where the run became longer since

    def planned(self, config: TrainParams) -> int:
        """The iterations of the whole run: the critic's warm-up, while it lasts its longest, and the policy's."""
        alone = config.update.critic.warmup.longest if config.credit.needs_critic and not self.policy_version else 0
        return config.iterations + (alone if self.policy_from is None else self.policy_from)

    def is_complete(self, config: TrainParams) -> bool:
        """Whether no iteration is left to train."""
        return self.stopped or self.iterations >= self.planned(config)

    @property
    def code_in_words(self) -> str:
        """Which code trained which iterations, and was accepted since: `0-11 3fa91c2b, 12-19 77b0e4aa`."""
        ends = [first for first, _ in self.code[1:]] + [self.iterations]
        trained = [f"{first}-{end - 1} {digest}" for (first, digest), end in zip(self.code, ends, strict=True)]
        return ", ".join([*trained, *([f"accepted {self.accepted}"] if self.accepted else [])])


def save(folder: Path, learner: Learner, record: Progress) -> None:
    """Writes the checkpoint, whole or not at all. An OSError says that it cannot be written; an earlier one stays."""
    with written(folder) as fresh:
        learner.save_policy(fresh / POLICY)
        seal(fresh, record, learner.save_state(fresh / LEARNER))


def hand_over(folder: Path, learner: Learner, *, halved: bool) -> None:
    """Writes the policy for a sampler alone, in bfloat16 if `halved`: no power cut matters. Raises as `save`."""
    with written(folder, lasting=False) as fresh:
        learner.save_policy(fresh, halved=halved)


def complete(folder: Path, merge: Callable[[Path], None]) -> None:
    """Has `merge` write merged weights if the policy's folder holds adapters alone. Raises as `save`."""
    record = progress(folder)
    if record is None or not is_adapters_alone(folder / POLICY):
        return
    require_whole(folder, POLICY)
    with written(folder) as fresh:
        shutil.copytree(folder, fresh, copy_function=os.link, ignore=shutil.ignore_patterns(POLICY, PROGRESS, SUMS))
        shutil.copytree(folder / POLICY, fresh / POLICY)  # no links: `merge` writes into the files
        merge(fresh / POLICY)
        seal(fresh, record)


def is_adapters_alone(policy: Path) -> bool:
    """Whether the folder of a policy holds adapters without merged weights."""
    return adapter_in(policy).is_dir() and not any(policy.glob("*.safetensors"))


@contextmanager
def written(folder: Path, *, lasting: bool = True) -> Iterator[Path]:
    """Replaces a checkpoint's folder by `replaced_folder`; the error of a full disk names the remedy."""
    import torch  # a slow import, needed by writers alone

    try:
        with replaced_folder(folder, lasting=lasting) as fresh:
            yield fresh
    except (torch.OutOfMemoryError, ChildProcessError):  # a device's memory, and a lost rank
        raise
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have errors of their own
        raise OSError(
            f"{folder} could not be written, the checkpoint before it is whole; "
            f"free some disk space and start again: {error}"
        ) from error


def set_aside(folder: Path, target: Path) -> None:
    """Replaces `target` by a copy of the checkpoint, which later `save`s do not change.

    The copy shares its files by hard links until the next `save`. An OSError says that the file system has none.
    """
    with replaced_folder(target) as fresh:
        shutil.copytree(folder, fresh, copy_function=os.link)


def set_aside_policy(policy: Path, record: Progress, target: Path) -> None:
    """Replaces `target` by a checkpoint of a policy alone, with links to its files as in `set_aside`."""
    with replaced_folder(target) as fresh:
        shutil.copytree(policy, fresh / POLICY, copy_function=os.link)
        seal(fresh, record)


def amend(folder: Path, record: Progress, policy_of: Path | None = None, *, learner: bool = True) -> None:
    """Gives the checkpoint another record, and the policy of the checkpoint `policy_of` if one is named.

    Leaves `learner/` out where that is False. Raises ValueError if the other policy is damaged. Other files keep their
    stored hashes and are not read.
    """
    if policy_of:
        require_whole(policy_of, POLICY)
    hashes = {name: digest for name, digest in read_sums(folder) if name != PROGRESS}
    left_out = [PROGRESS, SUMS, *([POLICY] if policy_of else []), *([] if learner else [LEARNER])]
    with replaced_folder(folder) as fresh:
        shutil.copytree(folder, fresh, copy_function=os.link, ignore=shutil.ignore_patterns(*left_out))
        if policy_of:
            shutil.copytree(policy_of / POLICY, fresh / POLICY, copy_function=os.link)
            hashes |= {name: digest for name, digest in read_sums(policy_of) if name != PROGRESS}
        seal(fresh, record, hashes)


def seal(fresh: Path, record: Progress, stored_hashes: Mapping[str, str] = MappingProxyType({})) -> None:
    """Completes a checkpoint's folder by its record and the hashes of all files; `stored_hashes` are not recomputed."""
    (fresh / PROGRESS).write_text(json.dumps(asdict(record), indent=2) + "\n")
    write_sums(fresh, stored_hashes)


def progress(folder: Path) -> Progress | None:
    """The progress of the checkpoint in `folder`, None without one. A ValueError refuses a missing or damaged file."""
    clear_leftovers(folder)
    if folder.exists():
        require_whole(folder, PROGRESS)
    return peek(folder)


def peek(folder: Path) -> Progress | None:
    """The `progress` of a checkpoint that a training may be writing: cleans nothing up. Raises as `progress`."""
    record = folder / PROGRESS
    if not record.exists() and not (folder / SUMS).exists():
        return None
    require_whole(folder, PROGRESS)
    try:
        return TypeAdapter(Progress).validate_json(record.read_bytes())  # older versions wrote further fields
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ValueError(f"{record} does not say how far a checkpoint is ({problem}); bring it back") from None


def load(folder: Path, learner: Learner) -> Progress:
    """Loads the checkpoint into a learner that was built with the same parameters, and sets the random states.

    A FileNotFoundError says that there is none, a ValueError that it is not as it was written.
    """
    record = progress(folder)
    if record is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint; train first")
    require_whole(folder)
    learner.restore(folder / POLICY, folder / LEARNER)
    return record


def require_whole(folder: Path, part: str = "") -> None:
    """Compares a checkpoint's files, or those whose names begin with `part`, with their hashes.

    A ValueError names the first file that is not as it was written, or says that hashes are missing.
    """
    sums = read_sums(folder)
    pairs = [(folder / name, expected) for name, expected in sums if name.startswith(part)]
    changed = next((file for file, expected in pairs if not file.is_file() or sha256(file) != expected), None)
    listed = PROGRESS in dict(sums)  # its line is the last, so the list is whole
    if listed and not changed:
        return
    if sums != read_sums(folder):  # a training has just written a newer checkpoint
        require_whole(folder, part)
        return
    path = shlex.quote(str(folder))
    remedy = f"bring the checkpoint back (`dvc checkout --force {path}`, a backup), or train it again with --fresh"
    if listed:
        raise ValueError(f"{changed} is missing or not as it was written, by {SUMS}; {remedy}")
    record = folder / PROGRESS  # the versions of the project that wrote no hashes did not write which code trained
    if (folder / SUMS).exists() or not record.exists() or b'"code"' in record.read_bytes():
        raise ValueError(f"{folder} has no complete {SUMS}, the hashes of its files; {remedy}")
    write = f"cd {path} && find * -type f ! -name {SUMS} -exec sha256sum {{}} + > {SUMS}"
    raise ValueError(
        f"{folder} has no {SUMS}, the hashes of its files, which the older version of the project that made it did not "
        f"write; write them: `{write}`"
    )
