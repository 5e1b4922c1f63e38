"""What a training run keeps on disk, and how it goes on after a kill."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from agent_r1.params import KeepParams
from agent_r1.policy import checkpoint
from agent_r1.policy.learner import Learner
from agent_r1.tables import remove_unfinished, write_text

logger = logging.getLogger(__name__)


class RunFolder:
    """The folder of one training run.

    DVC keeps it across reruns, also when parameters changed. A checkpoint that was trained under the same
    configuration, inputs and code is gone on from; with any other, the folder is emptied.

    One process at a time may open it, under a lock: what a killed one was writing is removed.

    Beside the latest checkpoint there may be a good one, to go back to. A good one is the checkpoint that an iteration
    without any sign of collapse began with.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.checkpoint = path / "checkpoint"
        self.metrics = path / "metrics.jsonl"
        self.mlflow_run_id = path / "mlflow_run_id"
        self.good = path / "good"
        found = checkpoint.progress(self.checkpoint)
        self.resumed = found is not None and found.fingerprint == fingerprint
        self.finished, self.rollbacks, self.stopped = 0, 0, False
        if found and self.resumed:
            self.finished, self.rollbacks, self.stopped = found.iterations, found.rollbacks, found.stopped
            remove_unfinished(path)
            logger.info("%s: going on after %d finished iterations", path, self.finished)
        elif path.exists():
            logger.info("%s: starting over, nothing there can be gone on from", path)
            shutil.rmtree(path)

    def trajectories(self, iteration: int) -> Path:
        return self.path / "trajectories" / f"{iteration:03d}.parquet"

    def proof(self, iteration: int) -> Path:
        return self.path / "proof" / f"{iteration:03d}.parquet"

    def credit(self, iteration: int) -> Path:
        return self.path / "credit" / f"{iteration:03d}.parquet"

    def record(self, iteration: int, metrics: dict[str, float]) -> None:
        """Adds a line to metrics.jsonl, in place of what an interrupted attempt left for this iteration."""
        lines = self.metrics.read_text().splitlines()[:iteration] if self.metrics.exists() else []
        write_text(self.metrics, "\n".join([*lines, json.dumps({"iteration": iteration, **metrics})]) + "\n")

    def history(self) -> list[dict[str, float]]:
        """The metrics of the finished iterations."""
        lines = self.metrics.read_text().splitlines()[: self.finished] if self.finished else []
        return [json.loads(line) for line in lines]

    def save(self, learner: Learner, *, finished: int, stopped: bool = False) -> None:
        """Writes the checkpoint, which makes the iterations finished ones; `stopped` makes them the last."""
        checkpoint.save(
            self.checkpoint,
            learner,
            iterations=finished,
            fingerprint=self.fingerprint,
            rollbacks=self.rollbacks,
            stopped=stopped,
        )
        self.finished, self.stopped = finished, stopped

    def set_aside(self) -> None:
        """Makes the latest checkpoint the good one as well."""
        checkpoint.set_aside(self.checkpoint, self.good)

    def go_back(self, learner: Learner) -> None:
        """Makes the good checkpoint the latest one, and the learner what it was then.

        The iterations after it are no longer finished, and their rows are removed. A process that is killed in here
        comes to the same decision again, or finds the good checkpoint in its place.
        """
        found = checkpoint.load(self.good, learner)
        for iteration in range(found.iterations, self.finished + 1):
            self._remove_rows(iteration)
        self.rollbacks += 1
        self.save(learner, finished=found.iterations)

    def is_complete(self, iterations: int) -> bool:
        """Whether nothing is left to train, of so many iterations."""
        return self.stopped or self.finished >= iterations

    def tidy(self, keep: KeepParams) -> None:
        """Removes what a complete run has no more use for, the good checkpoint first: it does not go back."""
        shutil.rmtree(self.good, ignore_errors=True)
        if not keep.learner:
            checkpoint.drop_learner(self.checkpoint)
        for iteration in range(self.finished - 1):
            if iteration % keep.every:
                self._remove_rows(iteration)

    def _remove_rows(self, iteration: int) -> None:
        for rows in (self.trajectories, self.proof, self.credit):
            rows(iteration).unlink(missing_ok=True)
