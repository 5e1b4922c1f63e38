"""The train stage: `agent-r1 train --run NAME`. `agent_r1.training.loop` is the loop itself."""

from __future__ import annotations

import dataclasses
import logging
import time
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from agent_r1 import params, tracking
from agent_r1.files import model_hash, write_text
from agent_r1.learn.learner import learner_of
from agent_r1.params.places import RunId
from agent_r1.tracking.runs import CODE_TAG, KIND_TAG
from agent_r1.training.assembly import Assembly
from agent_r1.training.folder import RunFolder
from agent_r1.training.identity import START
from agent_r1.training.loop import Training, Verb, iterate, leaves_work
from agent_r1.training.watch import reseeded
from flows import ranks
from flows.policies import teacher_of
from flows.ranks import code_of, facts_of, following, given_place, leading, shortfalls
from flows.stage import accelerator, started_by_another, task
from flows.terminal import counted

logger = logging.getLogger(__name__)


def train(run: RunId, fresh: bool = False) -> None:
    """Trains one run: collect, assign credit, update, log. Goes on where an earlier attempt was interrupted.

    `fresh` starts over, and moves the earlier attempt aside.
    """
    settings = params.load().of(run)
    places = settings.places
    assembly = Assembly(settings, run, places.warm_start, teacher_of(settings, run))
    place, code = given_place(settings.learner), code_of("train")
    for shortfall in shortfalls(settings):
        logger.warning(shortfall)
    with ExitStack() as stack:
        # before the folder is looked at: the process that holds the accelerator may be training this run
        stack.enter_context(accelerator(settings.operate.side_by_side, settings.gpus))
        aside, replace = places.aside, started_by_another()
        taken_up = assembly.taken_up(places.training(run), aside, code=code, fresh=fresh, replace=replace)
        folder, opening = stack.enter_context(taken_up)
        folder.costs.spent["cost/other_core_s"] += time.process_time()  # that it took to get here
        tracked = stack.enter_context(_tracked(run, settings, folder))
        learns = leaves_work(folder)
        if learns or place:  # the ranks of a launcher wait to be told that there is nothing to do
            seed = reseeded(folder.config.seed, folder.rollbacks) if learns else None
            with leading(settings.learner, ("train", *run.words), partial(_facts, settings, run), seed) as group:
                if learns:
                    _learn(opening(ranks=group), tracked, run.label)
        assembly.finish(folder)
        tracked.tag(CODE_TAG, folder.describe_code())


def _learn(opened: Training, tracked: tracking.Run, label: str) -> None:
    with opened as training, counted(label, training.folder.planned, training.folder.finished) as count:

        def shown(verb: Verb) -> Verb:
            @wraps(verb)
            def call(iteration: int, *others: Any) -> Any:
                count(f"{verb.__name__} {iteration}", iteration, training.folder.planned)
                return verb(iteration, *others)

            return task(call)

        iterate(training, tracked, as_task=shown)


def start(run: RunId, *, fresh: bool = False) -> None:
    """Runs the stage, or follows its leader if this process was given a rank behind one."""
    ranks.start(train, partial(_follow, run), run=run, fresh=fresh)


def _follow(run: RunId) -> None:
    settings = params.load().of(run)
    reference, model = teacher_of(settings, run), settings.places.warm_start
    config = settings.run(run).model_copy(update={"reference": reference})
    with following(settings.learner, partial(_facts, settings, run)) as (group, seed):
        if seed is not None:
            group.follow(learner_of(settings, config, model, seed=seed, ranks=group))


def _facts(settings: params.Params, run: RunId) -> dict[str, str]:
    """The facts that all ranks must share; the leader has taken up the run's folder before they are compared."""
    parameters, places = (settings, settings.run(run)), settings.places
    return facts_of("train", parameters, model_hash(str(places.warm_start)), places.training(run) / START)


def _tracked(run: RunId, settings: params.Params, folder: RunFolder) -> tracking.Run:
    """The run's record in MLflow, which the id in its folder finds again."""
    if found := tracking.run_of(folder.path):
        return found
    shown = tracking.run_params(run.name, settings, settings.run(run))
    tags = tracking.provenance(settings.prepare.dataset, run.sweep) | {KIND_TAG: "training"}
    if run.variant:
        tags |= {"overrides": settings.places.variant(run).read_text()}
    about = tracking.overrides(settings, run)
    started = tracking.start(dataclasses.replace(run, seed=folder.config.seed).label, shown, tags, about=about)
    started.uses(tracking.prepared(settings, folder.identity.inputs), "training")
    write_text(folder.mlflow_run_id, started.run_id)
    return started
