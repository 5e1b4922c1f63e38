"""The evaluations of registered versions, one folder for each time, outside of what DVC's stages depend on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from agent_r1.project import EVALUATIONS, evaluate_dir

from agent_r1.evaluation.comparison import Evaluation, read_evaluation
from agent_r1.evaluation.drift import same_setting
from agent_r1.tracking.registry import Version
from agent_r1.tracking.store import locked

KEPT = 14  # evaluations of one version on one choice of data sets; older ones are removed

Evaluate = Callable[[Sequence[str]], None]  # runs `python -m flows evaluate` with these arguments to its end


def measure(version: Version, dataset: str | None, evaluate: Evaluate) -> Path:
    """Evaluates a version again and returns the folder of the results, which is there whole or not at all.

    One process at a time does so for a version and a choice of data sets; others wait.

    Args:
        dataset: the one whose questions are asked, in place of all.
        evaluate: raises where the evaluation fails.
    """
    home = _home(version, dataset)
    home.mkdir(parents=True, exist_ok=True)
    chosen = ["--dataset", dataset] if dataset else []
    unfinished = home / ".unfinished"
    with locked(f"{home.name}.lock"):
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        try:
            evaluate(["--model", version.reference, *chosen, "--into", str(unfinished)])
            finished = home / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            unfinished.rename(finished)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        for old in _folders(home)[:-KEPT]:
            shutil.rmtree(old)
    return finished


def read(folder: Path) -> Evaluation:
    """One of them, by a name that tells it from the others."""
    return read_evaluation(f"{folder.parent.name} of {folder.name}", folder)


def previous(folder: Path) -> Evaluation | None:
    """The latest evaluation before this one that was measured alike, of the same policy."""
    current = read(folder)
    before = (read(each) for each in reversed(_folders(folder.parent)) if each.name < folder.name)
    return next((each for each in before if same_setting(current, each)), None)


def latest(version: Version) -> Evaluation | None:
    """The latest evaluation of a version on all data sets: one of these, or that of its run under outputs/evaluate."""
    folder = latest_folder(version)
    return read_evaluation(version.name, folder) if folder else None


def latest_folder(version: Version) -> Path | None:
    """Where that is."""
    folders = _folders(_home(version, None))
    if folders:
        return folders[-1]
    descriptor = version.descriptor
    hashes = evaluate_dir(descriptor.label, sweep=descriptor.sweep or None) / "hashes.json"
    current = hashes.exists() and json.loads(hashes.read_text())["policy"] == descriptor.policy_hash
    return hashes.parent if current else None


def _home(version: Version, dataset: str | None) -> Path:
    return EVALUATIONS / "-".join([version.name, *([dataset] if dataset else [])])


def _folders(home: Path) -> list[Path]:
    """Oldest first."""
    return sorted(each for each in home.glob("[!.]*") if each.is_dir())
