"""What a run's folder keeps when a run goes on, and that it starts over empty."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from agent_r1.files import replacing
from agent_r1.params import KeepParams, load
from agent_r1.policy.learner import Learner
from agent_r1.training.folder import RunFolder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run that was killed in its third iteration: two are finished, and the third had logged its metrics."""
    path = tmp_path / "ppo"
    (path / "checkpoint").mkdir(parents=True)
    record = {"iterations": 2, "policy_version": 1, "fingerprint": "same"}
    (path / "checkpoint" / "progress.json").write_text(json.dumps(record))
    (path / "metrics.jsonl").write_text("".join(f'{{"iteration": {i}, "reward/total": 0.{i}}}\n' for i in range(3)))
    (path / "mlflow_run_id").write_text("abc")
    return path


def test_the_same_fingerprint_goes_on(path: Path) -> None:
    folder = RunFolder(path, "same")
    assert folder.finished == 2
    assert folder.mlflow_run_id.read_text() == "abc"


def test_what_a_killed_process_was_writing_is_removed(path: Path) -> None:
    (path / "credit").mkdir()
    for name in ("metrics.jsonl", "credit/002.parquet"):
        with replacing(path / name) as temporary:
            temporary.write_text("whole")
            temporary.with_name(temporary.name.replace(f".{os.getpid()}.", ".1234567.")).write_text("half")
    RunFolder(path, "same")
    assert sorted(each.name for each in path.rglob("*") if each.is_file()) == [
        "002.parquet",
        "metrics.jsonl",
        "mlflow_run_id",
        "progress.json",
    ]


def test_a_repeated_iteration_takes_its_lines_place(path: Path) -> None:
    folder = RunFolder(path, "same")
    for iteration in (2, 3):
        folder.record(iteration, {"reward/total": 0.5})
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [(row["iteration"], row["reward/total"]) for row in rows] == [(0, 0.0), (1, 0.1), (2, 0.5), (3, 0.5)]


def test_history_is_what_finished_iterations_measured(path: Path) -> None:
    """The third line belongs to the iteration that was interrupted."""
    assert [row["reward/total"] for row in RunFolder(path, "same").history()] == [0.0, 0.1]


def test_a_new_run_has_no_history(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "ppo", "same").history() == []


def test_another_fingerprint_starts_over(path: Path) -> None:
    assert RunFolder(path, "other").finished == 0
    assert not path.exists()


def test_without_a_finished_iteration_it_starts_over(path: Path) -> None:
    (path / "checkpoint" / "progress.json").unlink()
    assert RunFolder(path, "same").finished == 0
    assert not path.exists()


def test_a_checkpoint_caught_between_two_renames_counts(path: Path) -> None:
    """The old one is out of the way and the new one not yet in its place."""
    (path / "checkpoint").rename(path / ".checkpoint.old")
    assert RunFolder(path, "same").finished == 2


def test_files_sort_by_iteration(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "ppo", "same")
    names = [folder.trajectories(iteration).name for iteration in (2, 10, 100)]
    assert names == sorted(names) == ["002.parquet", "010.parquet", "100.parquet"]
    assert folder.credit(2).parent.name == "credit"


@pytest.fixture
def learner(tiny_model: Path) -> Learner:
    settings, cpu = load(Path(__file__).parents[3] / "params.yaml"), torch.device("cpu")
    return Learner(tiny_model, settings.train.update, settings.model, with_critic=False, seed=3, device=cpu)


def change(learner: Learner) -> None:
    """Stands for an update: other weights and one version more."""
    learner.policy_version += 1
    with torch.no_grad():
        next(learner.policy.parameters()).add_(1.0)


def weights(learner: Learner) -> torch.Tensor:
    return next(learner.policy.parameters()).detach().clone()


def rolled_back(path: Path, learner: Learner) -> tuple[RunFolder, torch.Tensor]:
    """Three finished iterations and a fourth with its rows written; the second began with the good checkpoint.

    Returns the folder after it has gone back, and the weights that were good.
    """
    folder = RunFolder(path, "same")
    folder.save(learner, finished=0)
    for iteration in range(4):
        for rows in (folder.trajectories(iteration), folder.proof(iteration), folder.credit(iteration)):
            rows.parent.mkdir(exist_ok=True)
            rows.touch()
        folder.record(iteration, {"reward/total": iteration / 10})
        if iteration == 1:
            folder.set_aside()
            good = weights(learner)
        if iteration < 3:
            change(learner)
            folder.save(learner, finished=iteration + 1)
    change(learner)
    folder.go_back(learner)
    return folder, good


def test_going_back_brings_back_the_good_checkpoint(tmp_path: Path, learner: Learner) -> None:
    folder, good = rolled_back(tmp_path / "ppo", learner)
    assert (folder.finished, folder.rollbacks, folder.stopped) == (1, 1, False)
    assert learner.policy_version == 1
    assert torch.equal(weights(learner), good)
    assert [row["reward/total"] for row in folder.history()] == [0.0]
    for kind in ("trajectories", "proof", "credit"):
        assert [path.name for path in (folder.path / kind).iterdir()] == ["000.parquet"]


def test_a_run_that_went_back_and_was_killed_goes_on_from_there(tmp_path: Path, learner: Learner) -> None:
    _, good = rolled_back(tmp_path / "ppo", learner)
    again = RunFolder(tmp_path / "ppo", "same")
    assert (again.resumed, again.finished, again.rollbacks) == (True, 1, 1)
    change(learner)
    again.go_back(learner)
    assert (again.finished, again.rollbacks) == (1, 2)
    assert torch.equal(weights(learner), good)


def test_a_run_that_went_back_to_its_beginning_does_not_start_over(tmp_path: Path, learner: Learner) -> None:
    folder = RunFolder(tmp_path / "ppo", "same")
    folder.save(learner, finished=0)
    folder.set_aside()
    folder.go_back(learner)
    again = RunFolder(tmp_path / "ppo", "same")
    assert (again.resumed, again.finished, again.rollbacks) == (True, 0, 1)


def test_a_stopped_run_stays_stopped(tmp_path: Path, learner: Learner) -> None:
    RunFolder(tmp_path / "ppo", "same").save(learner, finished=4, stopped=True)
    again = RunFolder(tmp_path / "ppo", "same")
    assert (again.finished, again.stopped) == (4, True)
    assert not RunFolder(tmp_path / "ppo", "other").stopped


def test_a_tidy_run_keeps_no_second_checkpoint(tmp_path: Path, learner: Learner) -> None:
    folder, _ = rolled_back(tmp_path / "ppo", learner)
    assert folder.good.exists()
    folder.tidy(KeepParams(learner=True, every=1))
    assert not folder.good.exists()
    assert (folder.checkpoint / "learner.pt").exists()


@pytest.mark.parametrize(
    ("every", "kept"),
    [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 2, 4, 6]), (4, [0, 4, 6]), (5, [0, 5, 6]), (100, [0, 6])],
)
def test_a_tidy_run_keeps_rows_of_the_first_the_last_and_every_so_many_iterations(
    tmp_path: Path, learner: Learner, every: int, kept: list[int]
) -> None:
    folder = RunFolder(tmp_path / "ppo", "same")
    for iteration in range(7):
        for rows in (folder.trajectories(iteration), folder.credit(iteration)):
            rows.parent.mkdir(parents=True, exist_ok=True)
            rows.touch()
    folder.save(learner, finished=7)
    for _ in range(2):  # as a process does that finds the run complete
        folder.tidy(KeepParams(learner=False, every=every))
        for kind in ("trajectories", "credit"):
            assert sorted(int(path.stem) for path in (folder.path / kind).iterdir()) == kept
        assert sorted(path.name for path in folder.checkpoint.iterdir()) == ["policy", "progress.json"]


def test_a_run_is_complete_after_its_last_iteration_or_where_it_was_stopped(tmp_path: Path, learner: Learner) -> None:
    folder = RunFolder(tmp_path / "ppo", "same")
    folder.save(learner, finished=2)
    assert [folder.is_complete(iterations) for iterations in (1, 2, 3)] == [True, True, False]
    folder.save(learner, finished=2, stopped=True)
    assert folder.is_complete(3)
