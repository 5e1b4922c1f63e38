"""The evaluations of registered versions, one folder for each time, outside of what DVC's stages depend on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from agent_r1.evaluation.comparison import Evaluation, finished_folders, latest_folder, read_evaluation
from agent_r1.evaluation.drift import same_setting
from agent_r1.params import Params, Places
from agent_r1.tracking.registry import Version
from agent_r1.tracking.store import locked

Evaluate = Callable[[Sequence[str]], None]  # runs `python -m flows evaluate` with these arguments to its end


def measure(version: Version, dataset: str | None, settings: Params, evaluate: Evaluate) -> Path:
    """Evaluates a version on one data set or all, into a new folder that is there whole or not at all.

    One process at a time does so for a version and a choice of data sets; others wait. The latest
    `evaluate.history_kept` stay, older ones are removed. `evaluate` raises where the evaluation fails.
    """
    home = settings.places.history / "-".join([version.name, *([dataset] if dataset else [])])
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
        for old in finished_folders(home)[: -settings.evaluate.history_kept]:
            shutil.rmtree(old)
    return finished


def read(folder: Path) -> Evaluation:
    """One of them, by a name that tells it from the others."""
    return read_evaluation(f"{folder.parent.name} of {folder.name}", folder)


def previous(folder: Path) -> Evaluation | None:
    """The latest evaluation before this one that was measured alike, of the same policy."""
    current = read(folder)
    before = (read(each) for each in reversed(finished_folders(folder.parent)) if each.name < folder.name)
    return next((each for each in before if same_setting(current, each)), None)


def latest(version: Version, places: Places) -> Evaluation | None:
    """The latest evaluation of a version on all data sets, named as the version."""
    folder = latest_folder(version, places)
    return read_evaluation(version.name, folder) if folder else None
