"""The files that a training has left on disk, for those who only read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from agent_r1.params import policy_in
from agent_r1.policy import checkpoint
from agent_r1.records import Credit, Proof, Trajectory
from agent_r1.tables import read_rows


class PolicyOnDisk(NamedTuple):
    """Where the weights that sampled an iteration are, or the nearest ones."""

    path: Path | None  # None where neither they nor their successors are on disk
    sampled_it: bool  # whether they are the very weights
    note: str  # which weights they are, or why there are none


class StoredRun:
    """The finished iterations of a run. A training may be adding to them meanwhile."""

    def __init__(self, run: str, folder: Path, warm_start: Path) -> None:
        """Looks into the run's folder; `warm_start` is the model that it started from.

        Raises:
            FileNotFoundError: it holds no finished iteration.
        """
        progress = checkpoint.peek(folder / "checkpoint")
        if progress is None or not progress.iterations:
            raise FileNotFoundError(f"{folder} holds no finished iteration of {run}; train it first")
        self.run, self.folder, self.warm_start, self.progress = run, folder, warm_start, progress
        self.policy_folder = policy_in(folder)  # of the latest policy, in Hugging Face's form
        finished = range(progress.iterations)
        self.kept = [number for number in finished if self._rows("trajectories", number).exists()]

    def trajectories(self, iteration: int) -> list[Trajectory]:
        """The rows of one iteration."""
        return read_rows(self._rows("trajectories", iteration), Trajectory)

    def credits(self, iteration: int) -> list[Credit]:
        """The credit of an iteration's trajectories, as the run assigned it."""
        return read_rows(self._rows("credit", iteration), Credit)

    def proofs(self, iteration: int) -> list[Proof]:
        """The learner's logprobs of the trajectories that proved the weights; of none where there is no such file."""
        path = self._rows("proof", iteration)
        return read_rows(path, Proof) if path.exists() else []

    def choose(self, wanted: Sequence[str]) -> list[int]:
        """Iterations by number, or `all`; the last one that the warm-started model sampled and the last one if empty.

        With a critic that is warmed up, the first of the two is the iteration of the policy's first update.

        Raises:
            ValueError: there is no such iteration, or its rows were not kept.
        """
        if list(wanted) == ["all"]:
            return list(self.kept)
        if not wanted:
            by_warm_start = takewhile(lambda number: self.trajectories(number)[0].policy_version == 0, self.kept)
            return sorted({max(by_warm_start, default=0), self.kept[-1]})
        for number in wanted:
            if not number.isdecimal() or int(number) not in self.kept:
                there_are = ", ".join(map(str, self.kept))
                raise ValueError(f"{self.run} keeps no iteration {number!r}; choose of {there_are}, or all")
        return sorted(set(map(int, wanted)))

    def policy(self, version: int) -> PolicyOnDisk:
        """The policy that sampled trajectories of this version, or the one a single update later."""
        latest, path = self.progress.policy_version, self.policy_folder
        on_disk = {
            latest - 1: PolicyOnDisk(path, False, "the checkpoint, one update later than what sampled them"),
            latest: PolicyOnDisk(path, True, "the checkpoint, which sampled them"),
            0: PolicyOnDisk(self.warm_start, True, "the warm start, which sampled them"),
        }
        return on_disk.get(version, PolicyOnDisk(None, False, "none, its weights are no longer on disk"))

    def _rows(self, kind: str, iteration: int) -> Path:
        return self.folder / kind / f"{iteration:03d}.parquet"
