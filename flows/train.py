"""The train stage: `agent-r1 train --run NAME`. `agent_r1.training.loop` is the loop itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from agent_r1 import params, tracking
from agent_r1.credit import own as own_rewards
from agent_r1.envs.kinds import attempts_at, openings, require_playable
from agent_r1.envs.shared import Shared
from agent_r1.files import load_pretrained, model_hash, sha256, write_text
from agent_r1.learn import adapter, checkpoint, memory
from agent_r1.learn.learner import learner_of
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.params.train import TrainParams
from agent_r1.pretrained import compute_dtype, default_device
from agent_r1.records import Question
from agent_r1.rollout.chat import Chat
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows
from agent_r1.tools.toolbox import require_own
from agent_r1.tracking.runs import CODE_TAG, KIND_TAG
from agent_r1.training.folder import RunFolder
from agent_r1.training.identity import START, Identity
from agent_r1.training.loop import Training, Verb, iterate, leaves_work
from agent_r1.training.questions import require_gold_titles
from agent_r1.training.watch import reseeded
from flows import ranks
from flows.ranks import code_of, facts_of, following, given_place, leading
from flows.stage import accelerator, started_by_another, task
from flows.terminal import counted


def train(run: RunId, fresh: bool = False) -> None:
    """Trains one run: collect, assign credit, update, log. Goes on where an earlier attempt was interrupted.

    `fresh` starts over, and moves the earlier attempt aside.
    """
    settings = params.load().of(run)
    config, places = settings.run(run), settings.places
    questions = read_rows(places.questions, Question)
    require_gold_titles(questions, config.credit)
    require_playable(questions, settings.env)
    # before anything is waited for
    require_own(settings.env)
    own_rewards.load(config.credit.rewards)
    place, code = given_place(settings.learner), code_of("train")
    with ExitStack() as stack:
        # before the folder is looked at: the process that holds the accelerator may be training this run
        stack.enter_context(accelerator(settings.operate.side_by_side, settings.gpus))
        # before the folder is taken up: a run that cannot start replaces nothing
        memory.check(load_pretrained(AutoConfig, places.warm_start), settings, [run])
        adapter.warn_of_rounding(settings)
        index = open_index(settings.search, places.passages, places.index)
        shared = stack.enter_context(Shared(settings.env, index))
        identity = Identity.of(settings, config, inputs_of(settings, config, questions, shared), code)
        folder = RunFolder(places.training(run), identity, config)
        stack.enter_context(folder.opened(places.aside, fresh=fresh, replace=started_by_another()))
        tracked = stack.enter_context(_tracked(run, settings, config, folder, identity.inputs))
        learns = leaves_work(folder)
        if learns or place:  # the ranks of a launcher wait to be told that there is nothing to do
            seed = reseeded(config.seed, folder.rollbacks) if learns else None
            with leading(settings.learner, ("train", *run.words), partial(_facts, settings, run), seed) as group:
                if learns:
                    model = places.warm_start
                    training = Training(
                        settings, questions=questions, shared=shared, model=model, folder=folder, ranks=group
                    )
                    _learn(training, tracked, run.label)
        folder.tidy()
        checkpoint.complete(folder.checkpoint, _merging(settings))
        tracked.tag(CODE_TAG, folder.describe_code())


def _learn(opened: Training, tracked: tracking.Run, label: str) -> None:
    with opened as training, counted(label, training.config.iterations, training.folder.finished) as count:

        def shown(verb: Verb) -> Verb:
            @wraps(verb)
            def call(iteration: int, *others: Any) -> Any:
                count(f"{verb.__name__} {iteration}", iteration)
                return verb(iteration, *others)

            return task(call)

        iterate(training, tracked, as_task=shown)


def start(run: RunId, *, fresh: bool = False) -> None:
    """Runs the stage, or follows its leader if this process was given a rank behind one."""
    ranks.start(train, partial(_follow, run), run=run, fresh=fresh)


def _follow(run: RunId) -> None:
    settings = params.load().of(run)
    config, model = settings.run(run), settings.places.warm_start
    with following(settings.learner, partial(_facts, settings, run)) as (group, seed):
        if seed is not None:
            group.follow(learner_of(settings, config, model, seed=seed, ranks=group))


def _facts(settings: Params, run: RunId) -> dict[str, str]:
    """The facts that all ranks must share; the leader has taken up the run's folder before they are compared."""
    parameters, places = (settings, settings.run(run)), settings.places
    return facts_of("train", parameters, model_hash(str(places.warm_start)), places.training(run) / START)


def _merging(settings: Params) -> Callable[[Path], None]:
    """Merges adapters in the folder of a policy into the weights of the model that trainings start from."""
    dtype = compute_dtype(settings.model.dtype, default_device())
    return lambda policy: adapter.merge(policy, settings.places.warm_start, dtype)


def inputs_of(settings: Params, config: TrainParams, questions: Sequence[Question], shared: Shared) -> dict[str, str]:
    """Hashes of all inputs of a run."""
    places = settings.places
    opened = openings(attempts_at(questions, shared), questions, shared)
    return {
        "questions": sha256(places.questions),
        "passages": sha256(places.passages),
        "index": shared.index.index_hash,
        "warm_start": sha256(places.warm_start),
        "prompt": Chat(load_tokenizer(places.warm_start)).prompts_hash(opened),
        **own_rewards.sources(config.credit.rewards),
        **shared.sources(),
    }


def _tracked(
    run: RunId, settings: Params, config: TrainParams, folder: RunFolder, inputs: Mapping[str, str]
) -> tracking.Run:
    """The run's record in MLflow, which the id in its folder finds again."""
    if found := tracking.run_of(folder.path):
        return found
    shown = tracking.run_params(run.name, settings, config)
    tags = tracking.provenance(settings.prepare.dataset, run.sweep) | {KIND_TAG: "training"}
    if run.variant:
        tags |= {"overrides": settings.places.variant(run).read_text()}
    about = tracking.overrides(settings, run)
    started = tracking.start(replace(run, seed=config.seed).label, shown, tags, about=about)
    started.uses(tracking.prepared(settings, inputs), "training")
    write_text(folder.mlflow_run_id, started.run_id)
    return started
