"""The train stage: `agent-r1 train RUN`. `agent_r1.training.loop` is the loop itself."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

from agent_r1 import params, tracking
from agent_r1.files import model_hash, write_text
from agent_r1.identity import START
from agent_r1.learn.learner import learner_of
from agent_r1.params.places import RunId, is_copy
from agent_r1.tracking.runs import CODE_TAG, SETTINGS_TAG
from agent_r1.training.assembly import Assembly, Prepared
from agent_r1.training.folder import AnotherRunError, RunFolder
from agent_r1.training.loop import Training, Verb, iterate, leaves_work
from agent_r1.training.watch import reseeded
from flows import ranks
from flows.made_of import code_of
from flows.policies import teacher_of
from flows.ranks import facts_of, following, leading, shortfalls
from flows.stage import accelerator, started_by_another, task
from flows.terminal import counted

logger = logging.getLogger(__name__)


def train(run: RunId, fresh: bool = False) -> None:
    """Trains one run: collect, assign credit, update, log. Goes on where an earlier attempt was interrupted.

    `fresh` starts over, and moves the earlier attempt aside. So do DVC and the pipeline where it is another run's.
    """
    settings = params.load().of(run)
    teacher = teacher_of(settings, run)
    assembly = Assembly(settings, run, settings.places.warm_start, teacher)
    for shortfall in shortfalls(settings):
        logger.warning(shortfall)
    with (
        # before the folder is opened: the process that holds the accelerator may be training this run
        accelerator(settings.operate.side_by_side, settings.gpus),
        assembly.prepared(code_of("train")) as prepared,
        _open(prepared, run, fresh=fresh) as folder,
        _tracked(run, settings, folder) as tracked,
    ):
        if folder.progress.changes:
            tracked.tag(SETTINGS_TAG, "; ".join(folder.progress.changes))
        learns = leaves_work(folder)
        seed = reseeded(folder.config.seed, folder.rollbacks) if learns else None
        with leading(settings.learner, partial(_facts, settings, run), seed) as group:
            if learns:
                _learn(prepared.training(folder, group), tracked, run.label)
        prepared.finish(folder)
        tracked.tag(CODE_TAG, folder.progress.code_in_words)


@contextmanager
def _open(prepared: Prepared, run: RunId, *, fresh: bool) -> Iterator[RunFolder]:
    """The run's folder, open; another run's makes room where DVC or a flow started this process."""
    places = prepared.settings.places
    path = places.training(run)
    opening = partial(prepared.open, path, places.aside / run.sweep)
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(opening(fresh=fresh))
        except AnotherRunError as refusal:
            if not started_by_another():
                accept = f"; or accept it as it is: `agent-r1 keep {run.word}`" * ("other code" in refusal.loss)
                raise ValueError(f"{refusal}{accept}") from None
            _give_up(run, path, refusal)
            folder = stack.enter_context(opening(fresh=True))
        folder.costs.spent["cost/other_core_s"] += time.process_time()  # that it took to get here
        yield folder


def _give_up(run: RunId, folder: Path, refusal: AnotherRunError) -> None:
    """Says how much makes room for another run, and leaves dvc.lock in the folder that goes.

    Asks at a terminal above a core-hour, and raises the refusal for a no.
    """
    if is_copy():
        logger.info("%s; this experiment trains it anew", refusal)
        return
    logger.warning("%s; %s", refusal.loss, f"`agent-r1 restore {run.word}` brings it back")
    if refusal.core_hours > 1 and sys.stdin.isatty():
        logger.warning("%s is moved aside if you type y, and stays if you type anything else", folder)  # a whole line
        if sys.stdin.readline().strip() != "y":
            raise refusal
    if run.lock.exists():
        shutil.copy(run.lock, folder)


def _learn(opening: Training, tracked: tracking.Run, label: str) -> None:
    with opening as training, counted(label, training.folder.planned, training.folder.finished) as count:

        def as_task(verb: Verb) -> Verb:
            @wraps(verb)
            def call(iteration: int, *arguments: Any) -> Any:
                count(f"{verb.__name__} {iteration}", iteration, training.folder.planned)
                return verb(iteration, *arguments)

            return task(call)

        iterate(training, tracked, as_task=as_task)


def start(run: RunId, *, fresh: bool = False) -> None:
    """Runs the stage, by ranks if the learner asks for them, or follows its leader in one of these."""
    settings = params.load().of(run)
    command = ("train", run.word, *["--fresh"] * fresh)
    lock = partial(accelerator, settings.operate.side_by_side, settings.gpus)
    ranks.start(train, partial(_follow, run), settings.learner, command, lock, run=run, fresh=fresh)


def _follow(run: RunId) -> None:
    settings = params.load().of(run)
    reference = teacher_of(settings, run)
    model = settings.places.warm_start
    config = settings.run(run).model_copy(update={"reference": reference})
    with following(settings.learner, partial(_facts, settings, run)) as (group, seed):
        if seed is not None:
            group.follow(learner_of(settings, config, model, seed=seed, ranks=group))


def _facts(settings: params.Params, run: RunId) -> dict[str, str]:
    """The facts that all ranks must share; the leader has taken up the run's folder before they are compared."""
    parameters = (settings, settings.run(run))
    places = settings.places
    return facts_of("train", parameters, model_hash(str(places.warm_start)), places.training(run) / START)


def _tracked(run: RunId, settings: params.Params, folder: RunFolder) -> tracking.Run:
    """The run's record in MLflow, which the id in its folder finds again."""
    if earlier := tracking.run_of(folder.path):
        return earlier
    changes = {"overrides": settings.places.variant(run).read_text()} if run.variant else {}
    record = tracking.start_training(settings, run, changes)
    record.uses(tracking.prepared(settings, folder.identity.inputs), "training")
    write_text(folder.mlflow_run_id, record.run_id)
    return record
