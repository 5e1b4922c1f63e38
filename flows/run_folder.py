"""What a training run keeps on disk, and how it goes on after a kill."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from agent_r1.policy import checkpoint
from agent_r1.tables import replacing

logger = logging.getLogger(__name__)


class RunFolder:
    """The folder of one training run.

    DVC keeps it across reruns, also when parameters changed. A checkpoint that was trained under the same
    configuration, inputs and code is gone on from; with any other, the folder is emptied.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.checkpoint = path / "checkpoint"
        self.metrics = path / "metrics.jsonl"
        self.mlflow_run_id = path / "mlflow_run_id"
        found = checkpoint.progress(self.checkpoint)
        self.finished = found.iterations if found and found.fingerprint == fingerprint else 0
        if self.finished:
            logger.info("%s: going on after %d finished iterations", path, self.finished)
        elif path.exists():
            logger.info("%s: starting over, nothing there can be gone on from", path)
            shutil.rmtree(path)

    def trajectories(self, iteration: int) -> Path:
        return self.path / "trajectories" / f"{iteration:03d}.parquet"

    def credit(self, iteration: int) -> Path:
        return self.path / "credit" / f"{iteration:03d}.parquet"

    def record(self, iteration: int, metrics: dict[str, float]) -> None:
        """Adds a line to metrics.jsonl, in place of what an interrupted attempt left for this iteration."""
        lines = self.metrics.read_text().splitlines()[:iteration] if self.metrics.exists() else []
        with replacing(self.metrics) as temporary:
            temporary.write_text("\n".join([*lines, json.dumps({"iteration": iteration, **metrics})]) + "\n")
