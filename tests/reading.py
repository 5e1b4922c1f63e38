"""What stages leave in folders, as several rooms' tests read it."""

import json
from pathlib import Path
from typing import Any

from agent_r1.records import Prediction, Trajectory
from agent_r1.tables import read_rows

# The metrics that differ from process to process: seconds, and what a process remembers of its searches.
OWN = ("time/", "cost/", "tool/waiting", "tool/search/latency", "rollout/search_cache_hit_share")


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files below a folder, by their paths in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def metrics(run: Path) -> list[dict[str, float]]:
    """The metrics of a training, a row per iteration."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def lasting_metrics(run: Path) -> list[dict[str, float]]:
    """Those that a second training has too."""
    return [{name: value for name, value in row.items() if not name.startswith(OWN)} for row in metrics(run)]


def progress(run: Path) -> dict[str, Any]:
    """The record of a training's checkpoint."""
    return json.loads((run / "checkpoint/progress.json").read_text())


def trajectories(run: Path) -> list[list[Trajectory]]:
    """[iteration][row]"""
    return [read_rows(path, Trajectory) for path in sorted((run / "trajectories").iterdir())]


def predictions(evaluation: Path) -> list[Prediction]:
    """The graded answers of an evaluation."""
    return read_rows(evaluation / "predictions.parquet", Prediction)
