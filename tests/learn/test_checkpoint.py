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
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1.files import sha256
from agent_r1.learn import adapter, checkpoint
from agent_r1.learn.checkpoint import Progress
from agent_r1.learn.learner import Learner
from agent_r1.params.stages import LoraParams
from tests.learn.learning import Samples

Make = Callable[..., Any]
LORA = LoraParams(rank=4, alpha=8, targets=["all-linear"])
SHARD = "learner/shard-00001-model-00001-of-00001.safetensors"


def bits(learner: Learner) -> list[bytes]:
    assert learner.critic is not None
    return [
        parameter.detach().numpy().tobytes()
        for module in (learner.policy, learner.critic)
        for parameter in module.parameters()
    ]


def after(iterations: int) -> Progress:
    return Progress(iterations=iterations, policy_version=0)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def disk_full_after(limit_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond the limit: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def interrupted_after(renames: int) -> Callable[[Path, Path], Path]:
    """`Path.rename` of a process that is killed after so many of them."""
    done, rename = 0, Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        nonlocal done
        if done == renames:
            raise KeyboardInterrupt
        done += 1
        return rename(path, target)

    return interrupted


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
    assert bits(resumed) == bits(killed) != bits(straight)
    resumed.update(*samples, found.iterations)

    assert bits(resumed) == bits(straight)
    assert resumed.policy_version == straight.policy_version == 2


def test_progress_is_what_was_saved(make_learner: Make, tmp_path: Path) -> None:
    learner, expected = make_learner(with_critic=False), Progress(iterations=7, policy_version=5)
    assert checkpoint.progress(tmp_path / "checkpoint") is None
    checkpoint.save(tmp_path / "checkpoint", learner, expected)
    assert checkpoint.progress(tmp_path / "checkpoint") == expected
    assert checkpoint.load(tmp_path / "checkpoint", make_learner(with_critic=False)) == expected


def test_rollbacks_and_a_stop_are_part_of_progress(make_learner: Make, tmp_path: Path) -> None:
    expected = Progress(iterations=7, policy_version=0, rollbacks=2, stopped=True)
    checkpoint.save(tmp_path / "checkpoint", make_learner(with_critic=False), expected)
    assert checkpoint.progress(tmp_path / "checkpoint") == expected


def test_a_checkpoint_set_aside_stays_what_it_was(make_learner: Make, tmp_path: Path) -> None:
    learner, folder, aside = make_learner(with_critic=False), tmp_path / "checkpoint", tmp_path / "good"
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "good"]


@pytest.mark.parametrize("renames", [0, 1])
def test_an_interrupt_while_setting_aside_loses_nothing(
    make_learner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    learner, folder, aside = make_learner(with_critic=False), tmp_path / "checkpoint", tmp_path / "good"
    checkpoint.save(folder, learner, after(1))
    checkpoint.set_aside(folder, aside)
    checkpoint.save(folder, learner, after(2))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted_after(renames))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.set_aside(folder, aside)
    found = checkpoint.progress(aside)
    assert found is not None
    assert found.iterations == 1
    checkpoint.set_aside(folder, aside)
    assert contents(aside) == contents(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "good"]


def test_random_states_go_on(make_learner: Make, tmp_path: Path) -> None:
    learner = make_learner(with_critic=False)
    checkpoint.save(tmp_path / "checkpoint", learner, after(1))
    expected = (torch.rand(3).tolist(), random.random())
    checkpoint.load(tmp_path / "checkpoint", learner)
    assert (torch.rand(3).tolist(), random.random()) == expected


def test_the_policy_in_a_checkpoint_loads_in_plain_transformers(make_learner: Make, tmp_path: Path) -> None:
    learner = make_learner(with_critic=False)
    checkpoint.save(tmp_path / "checkpoint", learner, after(1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint/policy")
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), learner.policy.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint/policy").chat_template


def test_a_newer_checkpoint_takes_the_place_of_the_old(make_learner: Make, tmp_path: Path) -> None:
    learner = make_learner(with_critic=False)
    for iterations in (1, 2):
        checkpoint.save(tmp_path / "checkpoint", learner, after(iterations))
    found = checkpoint.progress(tmp_path / "checkpoint")
    assert found is not None
    assert found.iterations == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("limit_bytes", [0, 1000, 300_000])  # config, weights, optimisers
def test_a_full_disk_keeps_the_old_checkpoint_whole(make_learner: Make, tmp_path: Path, limit_bytes: int) -> None:
    learner = make_learner()
    folder = tmp_path / "checkpoint"
    checkpoint.save(folder, learner, after(1))
    before = contents(folder)
    with disk_full_after(limit_bytes), pytest.raises(OSError, match="free some disk space"):
        checkpoint.save(folder, learner, after(2))
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_the_state_of_training_is_hashed_while_it_is_written(
    make_learner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(checkpoint, "sha256", lambda file: read.append(file) or sha256(file))
    checkpoint.save(tmp_path / "checkpoint", make_learner(), after(1))
    assert {file.parent.name for file in read} == {".checkpoint.new", "policy"}
    checkpoint.require_whole(tmp_path / "checkpoint")
    assert SHARD in {str(file.relative_to(tmp_path / "checkpoint")) for file in read if file.exists()}


@pytest.mark.parametrize("fault", [SystemExit, KeyboardInterrupt, ChildProcessError])
def test_a_termination_while_writing_leaves_the_old_checkpoint_alone(
    make_learner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    """A SIGTERM is a SystemExit in a stage, under Prefect another exception; a rank that is lost is no full disk."""
    learner, folder = make_learner(with_critic=False), tmp_path / "checkpoint"
    checkpoint.save(folder, learner, after(1))
    before = contents(folder)

    def terminated(_: Path) -> None:
        raise fault

    monkeypatch.setattr("agent_r1.files._sync", terminated)
    with pytest.raises(fault):
        checkpoint.save(folder, learner, after(2))
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("renames", [0, 1])
def test_an_interrupt_between_the_renames_loses_nothing(
    make_learner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    learner = make_learner(with_critic=False)
    folder = tmp_path / "checkpoint"
    checkpoint.save(folder, learner, after(1))
    before = contents(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted_after(renames))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(folder, learner, after(2))
    found = checkpoint.progress(folder)
    assert found is not None
    assert found.iterations == 1
    assert contents(folder) == before
    checkpoint.save(folder, learner, after(2))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.fixture
def alone(make_learner: Make, tmp_path: Path) -> Path:
    """A checkpoint whose policy is there as adapters alone."""
    checkpoint.save(tmp_path / "checkpoint", make_learner(adapter=LORA, merges=False), after(3))
    return tmp_path / "checkpoint"


def test_the_weights_beneath_adapters_are_nowhere_in_a_checkpoint(make_learner: Make, alone: Path) -> None:
    learner = make_learner(adapter=LORA)
    beneath = sum(weight.nbytes for weight in learner.policy.parameters() if not weight.requires_grad)
    assert not list(alone.rglob("model.safetensors"))
    assert sum(path.stat().st_size for path in alone.rglob("*") if path.suffix != ".json") < beneath


def test_merged_weights_complete_a_checkpoint_once(make_learner: Make, alone: Path, tiny_model: Path) -> None:
    """It is then what a learner that merges would have saved, and can still be gone on from."""
    asked: list[Path] = []

    def merge(policy: Path) -> None:
        asked.append(policy)
        adapter.merge(policy, tiny_model, torch.float32)

    before, learner = contents(alone), make_learner(adapter=LORA)
    for _ in range(2):
        checkpoint.complete(alone, merge)
    checkpoint.save(alone.with_name("merged"), learner, after(3))
    policies = [
        {name: content for name, content in contents(folder).items() if name.startswith("policy")}
        for folder in (alone, alone.with_name("merged"))
    ]
    assert (len(asked), policies[0]) == (1, policies[1])
    assert contents(alone)[SHARD] == before[SHARD]
    checkpoint.require_whole(alone)
    assert checkpoint.load(alone, learner) == after(3)


def test_a_checkpoint_without_adapters_is_complete(make_learner: Make, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, make_learner(merges=False), after(1))
    before = contents(tmp_path)
    checkpoint.complete(tmp_path, lambda _: pytest.fail("there is nothing to merge"))
    checkpoint.complete(tmp_path / "elsewhere", lambda _: pytest.fail("there is nothing at all"))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError("No space left on device")])
def test_what_keeps_from_merging_leaves_the_adapters_as_they_are(
    alone: Path, fault: BaseException | type[BaseException]
) -> None:
    before = contents(alone)

    def fail(policy: Path) -> None:
        (policy / "config.json").write_text("half")
        raise fault

    with pytest.raises(KeyboardInterrupt if fault is KeyboardInterrupt else OSError):
        checkpoint.complete(alone, fail)
    assert contents(alone) == before
    assert [path.name for path in alone.parent.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("name", ["policy/model.safetensors", "policy/config.json", SHARD, "progress.json"])
def test_a_flipped_bit_is_refused_by_the_files_name(make_learner: Make, tmp_path: Path, name: str) -> None:
    learner, folder = make_learner(with_critic=False), tmp_path / "checkpoint"
    checkpoint.save(folder, learner, after(1))
    written = (folder / name).read_bytes()
    for bit in random.Random(name).sample(range(8 * len(written)), 10):
        flip(folder / name, bit)
        with pytest.raises(ValueError, match=f"{name} is missing or not as it was written, .*--fresh"):
            checkpoint.load(folder, learner)
        with pytest.raises(ValueError, match=name):
            checkpoint.require_whole(folder, name)
        (folder / name).write_bytes(written)
    assert checkpoint.load(folder, learner) == after(1)


def test_a_flipped_bit_of_the_hashes_is_refused(make_learner: Make, tmp_path: Path) -> None:
    learner, folder = make_learner(with_critic=False), tmp_path / "checkpoint"
    checkpoint.save(folder, learner, after(1))
    written = (folder / "SHA256SUMS").read_bytes()
    for bit in random.Random(0).sample(range(8 * len(written) - 8), 20):
        flip(folder / "SHA256SUMS", bit)
        with pytest.raises(ValueError, match="not as it was written"):
            checkpoint.load(folder, learner)
        (folder / "SHA256SUMS").write_bytes(written)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_an_amended_checkpoint_keeps_its_hashes(make_learner: Make, tmp_path: Path) -> None:
    """It is the whole one again but for its record, without a look at its files: one that changed before is told."""
    learner, folder, aside = make_learner(with_critic=False), tmp_path / "checkpoint", tmp_path / "best"
    checkpoint.save(folder, learner, after(1))
    checkpoint.set_aside_policy(folder / "policy", after(1), aside)
    checkpoint.amend(folder, after(2))
    assert checkpoint.load(folder, learner) == after(2)
    flip(folder / SHARD, 0)
    checkpoint.amend(folder, after(3), policy_of=aside)
    checkpoint.require_whole(folder, "policy")
    with pytest.raises(ValueError, match=f"{SHARD} is missing or not as it was written"):
        checkpoint.load(folder, learner)


def test_hashes_are_those_of_the_newer_checkpoint_that_came_meanwhile(
    make_learner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, folder = make_learner(with_critic=False), tmp_path / "checkpoint"
    checkpoint.save(folder, learner, after(1))
    olds = iter([checkpoint._sums(folder)])
    checkpoint.save(folder, learner, after(2))
    read = checkpoint._sums
    monkeypatch.setattr(checkpoint, "_sums", lambda folder: next(olds, None) or read(folder))
    assert checkpoint.peek(folder) == after(2)


@pytest.mark.parametrize("lines", [None, 0, 1, -1])
@pytest.mark.parametrize("before_sums", [False, True])
def test_without_all_of_its_hashes_a_checkpoint_is_damaged_unless_its_record_is_of_before_them(
    make_learner: Make, tmp_path: Path, lines: int | None, before_sums: bool
) -> None:
    """Then the refusal brings the command that writes them."""
    learner, folder = make_learner(with_critic=False), tmp_path / "a run's" / "checkpoint"
    checkpoint.save(folder, learner, after(1))
    sums = folder / "SHA256SUMS"
    kept = sums.read_text().splitlines(keepends=True)[:lines]
    sums.unlink() if lines is None else sums.write_text("".join(kept))
    if before_sums:
        (folder / "progress.json").write_text('{"iterations": 1, "policy_version": 0, "fingerprint": "0a1b2c3d"}')
    readers = (
        checkpoint.peek,
        checkpoint.progress,
        lambda folder: checkpoint.load(folder, learner),
        lambda folder: checkpoint.require_whole(folder, "policy"),
        lambda folder: checkpoint.amend(tmp_path / "other", after(2), policy_of=folder),
    )
    for read in readers:
        with pytest.raises(ValueError, match=r"has no (complete )?SHA256SUMS") as refusal:
            read(folder)
    said = str(refusal.value)
    assert said.startswith(str(folder))
    if not before_sums or lines is not None:
        checkout = f"dvc checkout --force {quote(str(folder))}"
        assert said.endswith(f"bring the checkpoint back (`{checkout}`, a backup), or train it again with --fresh")
        return
    assert "which the older version of the project that made it did not write" in said
    subprocess.run(str(refusal.value).split("`")[-2], shell=True, check=True)
    assert checkpoint.load(folder, learner) == after(1)


@pytest.mark.parametrize("record", ["", "[]", '{"iterations": 1}', '{"iterations": "x", "policy_version": 1}'])
def test_a_record_of_no_checkpoint_is_refused_by_name(tmp_path: Path, record: str) -> None:
    written = tmp_path / "progress.json"
    written.write_text(record)
    (tmp_path / "SHA256SUMS").write_text(f"{sha256(written)}  progress.json\n")
    with pytest.raises(ValueError, match=f"{tmp_path}/progress.json does not say how far a checkpoint is"):
        checkpoint.peek(tmp_path)


def test_loading_without_a_checkpoint_is_refused(make_learner: Make, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        checkpoint.load(tmp_path / "checkpoint", make_learner(with_critic=False))


def test_a_checkpoint_whose_learner_is_of_an_older_version_is_refused(make_learner: Make, tmp_path: Path) -> None:
    learner, folder = make_learner(with_critic=False), tmp_path / "checkpoint"
    checkpoint.save(folder, learner, after(1))
    (folder / "learner.pt").touch()
    with pytest.raises(ValueError, match=r"older version of the project, whose learner\.pt .*--fresh"):
        checkpoint.load(folder, learner)
