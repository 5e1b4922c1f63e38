"""Trainings that changes would cost: `agent-r1 keep RUN` accepts one, `agent-r1 restore RUN` brings one back."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

from agent_r1 import params, tracking
from agent_r1.files import move_aside, trained_alone
from agent_r1.identity import Identity, read_start
from agent_r1.learn import checkpoint
from agent_r1.params.places import RunId
from agent_r1.tracking.runs import CODE_TAG
from flows.dvc_files import entries_of, put_entries, require_dvc
from flows.graph import out_of_date
from flows.made_of import code_of

TIME = r"-\d{8}T[\d.]+Z"  # the end of the name of a folder that was moved aside
MAKER = "train"  # the beginning of the names of stages that make a training

logger = logging.getLogger(__name__)


def keep(run: RunId) -> None:
    """Accepts a complete training under changed code: it is not trained anew, by hand or by DVC.

    The record has the digests of the code that trained it and of the code that was accepted. Stages that were up to
    date stay so. Raises ValueError for a training that is not complete or another run's.
    """
    settings = params.load().of(run)
    path = settings.places.training(run)
    start = read_start(path)
    record = checkpoint.peek(path / "checkpoint")
    if not start or not record or not record.is_complete(settings.run(run)):
        raise ValueError(f"{path} is not complete; `agent-r1 train {run.word}` trains it, or goes on")
    identity = Identity.of(settings, settings.run(run), start.inputs, code_of("train"))
    if reason := identity.refusal(path, complete=False):
        raise ValueError(f"{reason}; go back to that, or let it be trained anew: it is not the code alone")
    with trained_alone(path):
        names = entries_of(run.lock, path)
        stale = out_of_date(*map(run.stage, names)) if names else set()
        record = replace(record, accepted=identity.code_digest)
        checkpoint.amend(path / "checkpoint", record)
    if tracked := tracking.run_of(path):
        tracked.tag(CODE_TAG, record.code_in_words)
    current = [run.stage(name) for name in names if name.startswith(MAKER) or run.stage(name) not in stale]
    if current:
        require_dvc("commit", "--force", *current)
    logger.info("%s is kept: %s", path, record.code_in_words)


def restore(word: str) -> None:
    """Brings a training back that was moved aside, the last one of a label, with its part of dvc.lock and its scores.

    The training in its place is moved aside. Raises ValueError if there is none of that name or label.
    """
    places = params.load().places
    run = RunId.meant(re.sub(f"{TIME}$", "", word))
    path = places.training(run)
    aside = places.aside / run.sweep
    name = word.rpartition("/")[2]
    folders = sorted(folder for folder in aside.glob("*") if re.fullmatch(f"{name}({TIME})?", folder.name))
    if not folders:
        raise ValueError(f"there is no {name} in {aside}, where trainings are that made room")
    with trained_alone(path):
        if path.exists():
            logger.info("%s was moved to %s", path, move_aside(path, aside))
        folders[-1].rename(path)
        lock = path / run.lock.name
        if lock.exists():
            entries = entries_of(lock, path)
            put_entries(run.lock, entries)
            lock.unlink()
            readers = [run.stage(stage) for stage in entries if not stage.startswith(MAKER)]
            if readers:  # else DVC takes all
                require_dvc("checkout", "--force", *readers)
    logger.info("%s is back from %s", path, folders[-1])
