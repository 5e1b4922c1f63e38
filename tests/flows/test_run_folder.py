"""What a run's folder keeps when a run goes on, and that it starts over empty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.run_folder import RunFolder


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


def test_a_repeated_iteration_takes_its_lines_place(path: Path) -> None:
    folder = RunFolder(path, "same")
    for iteration in (2, 3):
        folder.record(iteration, {"reward/total": 0.5})
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [(row["iteration"], row["reward/total"]) for row in rows] == [(0, 0.0), (1, 0.1), (2, 0.5), (3, 0.5)]


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
