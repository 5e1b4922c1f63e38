"""Checkpoints: the same bits again, and what becomes of one that is cut short, damaged or set aside."""

import random
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
import torch

from agent_r1.learn import adapter, checkpoint
from agent_r1.learn.checkpoint import Progress
from agent_r1.learn.learner import Learner
from agent_r1.params.stages import LoraParams
from tests.learn.learning import LORA, Samples, contents, same_bits, weights

Make = Callable[..., Any]
SHARD = "learner/shard-00001-model-00001-of-00001.safetensors"


def held(learner: Learner) -> list[torch.Tensor]:
    return weights(learner.policy, learner.critic)


def after(iterations: int) -> Progress:
    return Progress(iterations=iterations, policy_version=0)


@pytest.fixture
def learner(make_learner: Make) -> Learner:
    return make_learner(with_critic=False)


@pytest.fixture
def folder(learner: Learner, tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "checkpoint", learner, after(1))
    return tmp_path / "checkpoint"


@contextmanager
def disk_full_after(limit_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond the limit: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("adapter", "merges"), [(None, True), (LORA, True), (LORA, False)])
def test_a_resumed_training_ends_with_the_same_bits(
    make_learner: Make, samples: Samples, tmp_path: Path, adapter: LoraParams | None, merges: bool
) -> None:
    settings: dict[str, Any] = {"minibatches": 2, "epochs": 2, "adapter": adapter, "merges": merges}
    straight, killed, resumed = (make_learner(**settings) for _ in range(3))
    straight.update(*samples, 0)
    straight.update(*samples, 1)

    killed.update(*samples, 0)
    checkpoint.save(tmp_path / "checkpoint", killed, after(1))
    found = checkpoint.load(tmp_path / "checkpoint", resumed)
    assert same_bits(held(resumed), held(killed))
    assert not same_bits(held(resumed), held(straight))
    resumed.update(*samples, found.iterations)

    assert same_bits(held(resumed), held(straight))
    assert resumed.policy_version == straight.policy_version == 2


def test_a_checkpoint_set_aside_stays_what_it_was(learner: Learner, folder: Path) -> None:
    aside = folder.with_name("good")
    for iterations in (1, 2):
        checkpoint.save(folder, learner, after(iterations))
        before = contents(folder)
        checkpoint.set_aside(folder, aside)
        assert contents(folder) == contents(aside) == before
    weights = "policy/model.safetensors"
    assert (folder / weights).stat().st_ino == (aside / weights).stat().st_ino, "no second copy on disk"
    checkpoint.save(folder, learner, after(3))
    assert contents(aside) == before != contents(folder)
    assert checkpoint.load(aside, learner).iterations == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoint", "good"]


def test_random_states_go_on(learner: Learner, folder: Path) -> None:
    checkpoint.save(folder, learner, after(2))
    expected = (torch.rand(3).tolist(), random.random())
    checkpoint.load(folder, learner)
    assert (torch.rand(3).tolist(), random.random()) == expected


@pytest.mark.parametrize("limit_bytes", [0, 1000, 300_000])  # config, weights, optimisers
def test_a_full_disk_keeps_the_old_checkpoint_whole(learner: Learner, folder: Path, limit_bytes: int) -> None:
    before = contents(folder)
    with disk_full_after(limit_bytes), pytest.raises(OSError, match="free some disk space"):
        checkpoint.save(folder, learner, after(2))
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("fault", [SystemExit, KeyboardInterrupt, ChildProcessError])
def test_a_termination_while_writing_leaves_the_old_checkpoint_alone(
    learner: Learner, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    """A SIGTERM is a SystemExit in a stage, under Prefect another exception; a rank that is lost is no full disk."""
    before = contents(folder)

    def terminated(_: Path) -> None:
        raise fault

    monkeypatch.setattr("agent_r1.files._sync", terminated)
    with pytest.raises(fault):
        checkpoint.save(folder, learner, after(2))
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


@pytest.fixture
def alone(make_learner: Make, tmp_path: Path) -> Path:
    """A checkpoint whose policy is there as adapters alone."""
    checkpoint.save(tmp_path / "checkpoint", make_learner(adapter=LORA, merges=False), after(3))
    return tmp_path / "checkpoint"


def test_merged_weights_complete_a_checkpoint_once(make_learner: Make, alone: Path, tiny_model: Path) -> None:
    """It is then what a learner that merges would have saved, and can still be gone on from."""
    asked: list[Path] = []

    def merge(policy: Path) -> None:
        asked.append(policy)
        adapter.merge(policy, tiny_model, torch.float32)

    before, learner = contents(alone), make_learner(adapter=LORA)
    beneath = sum(weight.nbytes for weight in learner.policy.parameters() if not weight.requires_grad)
    assert sum(len(content) for name, content in before.items() if not name.endswith(".json")) < beneath
    for _ in range(2):
        checkpoint.complete(alone, merge)
    checkpoint.save(alone.with_name("merged"), learner, after(3))
    merged = contents(alone.with_name("merged") / "policy")
    assert (len(asked), contents(alone / "policy")) == (1, merged)
    assert contents(alone)[SHARD] == before[SHARD]
    checkpoint.require_whole(alone)
    assert checkpoint.load(alone, learner) == after(3)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_what_keeps_from_merging_leaves_the_adapters_as_they_are(alone: Path, fault: type[BaseException]) -> None:
    before = contents(alone)

    def fail(policy: Path) -> None:
        (policy / "config.json").write_text("half")
        raise fault

    with pytest.raises(fault):
        checkpoint.complete(alone, fail)
    assert contents(alone) == before
    assert [path.name for path in alone.parent.iterdir()] == ["checkpoint"]


def test_an_amended_checkpoint_keeps_its_hashes(learner: Learner, folder: Path) -> None:
    """It is the whole one again but for its record, without a look at its files: one that changed before is told."""
    aside = folder.with_name("best")
    checkpoint.set_aside_policy(folder / "policy", after(1), aside)
    checkpoint.amend(folder, after(2))
    assert checkpoint.load(folder, learner) == after(2)
    content = bytearray((folder / SHARD).read_bytes())
    content[0] ^= 1
    (folder / SHARD).write_bytes(content)
    checkpoint.amend(folder, after(3), policy_of=aside)
    checkpoint.require_whole(folder, "policy")
    with pytest.raises(ValueError, match=f"{SHARD} is missing or not as it was written"):
        checkpoint.load(folder, learner)


def test_hashes_are_those_of_newer_checkpoint(learner: Learner, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    olds = iter([checkpoint.read_sums(folder)])
    checkpoint.save(folder, learner, after(2))
    read = checkpoint.read_sums
    monkeypatch.setattr(checkpoint, "read_sums", lambda folder: next(olds, None) or read(folder))
    assert checkpoint.peek(folder) == after(2)


@pytest.mark.parametrize("lines", [None, 0, 1, -1])
@pytest.mark.parametrize("before_sums", [False, True])
def test_missing_hashes_are_a_damage(learner: Learner, tmp_path: Path, lines: int | None, before_sums: bool) -> None:
    """Then the refusal brings the command that writes them."""
    folder = tmp_path / "a run's" / "checkpoint"
    checkpoint.save(folder, learner, after(1))
    sums = folder / "SHA256SUMS"
    kept = sums.read_text().splitlines(keepends=True)[:lines]
    sums.unlink() if lines is None else sums.write_text("".join(kept))
    if before_sums:
        (folder / "progress.json").write_text('{"iterations": 1, "policy_version": 0, "fingerprint": "0a1b2c3d"}')
    for read in (
        checkpoint.peek,
        checkpoint.progress,
        lambda folder: checkpoint.load(folder, learner),
        lambda folder: checkpoint.require_whole(folder, "policy"),
        lambda folder: checkpoint.amend(tmp_path / "other", after(2), policy_of=folder),
    ):
        with pytest.raises(ValueError, match=r"has no (complete )?SHA256SUMS") as refusal:
            read(folder)
    if not before_sums or lines is not None:
        assert f"`dvc checkout --force {quote(str(folder))}`" in str(refusal.value)
        return
    subprocess.run(str(refusal.value).split("`")[-2], shell=True, check=True)
    assert checkpoint.load(folder, learner) == after(1)
