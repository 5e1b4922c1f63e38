"""The train stage: `agent-r1 train --run NAME`. The loop itself is `agent_r1.training.loop`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from agent_r1 import params, tracking
from agent_r1.credit import own as own_rewards
from agent_r1.devices.gpus import default_device
from agent_r1.devices.group import follow
from agent_r1.devices.ranks import Ranks
from agent_r1.envs.kinds import attempts_at, openings, require_playable
from agent_r1.envs.shared import Shared
from agent_r1.files import load_pretrained, model_hash, sha256, write_text
from agent_r1.learn import adapter, checkpoint, memory
from agent_r1.learn.learner import learner_of
from agent_r1.learn.model import compute_dtype, load_tokenizer
from agent_r1.params import Params, fingerprint
from agent_r1.params.places import RunId
from agent_r1.params.train import TrainParams
from agent_r1.records import Question
from agent_r1.rollout.chat import Chat
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows
from agent_r1.tools import own
from agent_r1.tracking.runs import CODE_TAG, KIND_TAG
from agent_r1.training.folder import RunFolder
from agent_r1.training.identity import START, Identity
from agent_r1.training.loop import Training, iterate, leaves_work
from agent_r1.training.questions import require_gold_titles
from agent_r1.training.watch import reseeded
from flows.accelerator import accelerator
from flows.ranks import alike, code_of, following, follows, given_place, leading
from flows.stage import run_stage, started_by_another, task
from flows.terminal import verbs_shown


def train(run: str, seed: int | None = None, sweep: str = "", fresh: bool = False) -> None:
    """Trains one run: collect, assign credit, update, log; goes on where an earlier attempt was interrupted.

    It is told by the fields of a `RunId`; `fresh` starts over, and moves what is there aside.
    """
    meant = RunId.named(run, seed, sweep)
    settings = params.load().of(meant)
    config, places = settings.run(meant), settings.places
    questions = read_rows(places.questions, Question)
    require_gold_titles(questions, config.credit)
    require_playable(questions, settings.env)
    # before anything is waited for
    own.require(settings.env)
    own_rewards.load(config.credit.rewards)
    place = given_place(settings.learner)
    # before the folder is looked at: the process that holds it may be training this run
    with accelerator(settings.operate.side_by_side, settings.gpus):
        # before the folder is taken up: what cannot run replaces nothing
        memory.check(load_pretrained(AutoConfig, places.warm_start), settings, [meant])
        adapter.warn_of_rounding(settings)
        index = open_index(settings.search, places.passages, places.index)
        with Shared(settings.env, index) as shared:
            identity = Identity.of(settings, config, inputs_of(settings, config, questions, shared), code_of("train"))
            folder = RunFolder(places.training(meant), identity)
            with (
                folder.opened(config.iterations, aside=places.aside, fresh=fresh, replace=started_by_another()),
                _tracked(meant, settings, config, folder, identity.inputs) as tracked,
            ):
                learns = leaves_work(folder, config)
                if learns or place:  # the ranks of a launcher wait to be told that there is nothing to do
                    with _leading(meant, settings, config, folder, learns=learns) as ranks:
                        if learns:
                            _learn(meant.label, settings, config, questions, shared, folder, tracked, ranks)
                folder.tidy(config.keep)
                checkpoint.complete(folder.checkpoint, _merging(settings))
                tracked.tag(CODE_TAG, folder.describe_code())


def _learn(
    label: str,
    settings: Params,
    config: TrainParams,
    questions: list[Question],
    shared: Shared,
    folder: RunFolder,
    tracked: tracking.Run,
    ranks: Ranks,
) -> None:
    model = settings.places.warm_start
    with (
        Training(
            settings, config, questions=questions, shared=shared, model=model, folder=folder, ranks=ranks
        ) as training,
        verbs_shown(label, folder.finished, config.iterations) as shown,
    ):
        iterate(training, tracked, as_task=lambda verb: task(shown(verb)))


def _leading(
    meant: RunId, settings: Params, config: TrainParams, folder: RunFolder, *, learns: bool
) -> AbstractContextManager[Ranks]:
    """The ranks of the run's learner while the block lasts; they have one if it `learns`."""
    seed = reseeded(config.seed, folder.rollbacks) if learns else None
    return leading(settings.learner, _command(meant), lambda: _alike(settings, config, folder.path), seed)


def start(run: str, seed: int | None = None, sweep: str = "", fresh: bool = False) -> None:
    """The whole of the command: the stage, or where it is given a rank that follows another's, what that one does."""
    if follows():
        _follow(RunId.named(run, seed, sweep))
    else:
        run_stage(train, run=run, seed=seed, sweep=sweep, fresh=fresh)


def _follow(meant: RunId) -> None:
    """Has a learner of its own, and does with it what the leader of the training does."""
    settings = params.load().of(meant)
    config, places = settings.run(meant), settings.places
    with following(settings.learner, lambda: _alike(settings, config, places.training(meant))) as (group, seed):
        if seed is not None:
            follow(learner_of(settings, config, places.warm_start, seed=seed, ranks=group), group)


def _command(meant: RunId) -> list[str]:
    """Starts a follower of the training of a run."""
    options = {"--run": meant.name, "--seed": meant.seed, "--sweep": meant.sweep}
    given = [str(word) for option in options.items() for word in option if option[1] not in (None, "")]
    return [sys.executable, "-m", "flows", "train", *given]


def _alike(settings: Params, config: TrainParams, folder: Path) -> dict[str, str]:
    """What all ranks must have the same of, by its name; the folder is the run's, which the leader has taken up."""
    start = folder / START
    return {
        **alike("train", fingerprint(settings, config), model_hash(str(settings.places.warm_start))),
        "folder of the run": fingerprint(start.read_text()) if start.exists() else "nothing",
    }


def _merging(settings: Params) -> Callable[[Path], None]:
    """Merges adapters in the folder of a policy into the weights of the model that trainings start from."""
    dtype = compute_dtype(settings.model.dtype, default_device())
    return lambda policy: adapter.merge(policy, settings.places.warm_start, dtype)


def inputs_of(settings: Params, config: TrainParams, questions: Sequence[Question], shared: Shared) -> dict[str, str]:
    """What the run is trained on, as hashes."""
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
    """The run's record in MLflow, found again by the id in its folder."""
    if found := tracking.run_of(folder.path):
        return found
    shown = tracking.run_params(run.name, settings, config)
    tags = tracking.provenance(settings.prepare.dataset, run.sweep) | {KIND_TAG: "training"}
    if run.variant:
        tags |= {"overrides": settings.places.variant(run).read_text()}
    about = tracking.differences(settings, run)
    started = tracking.start(replace(run, seed=config.seed).label, shown, tags, about=about)
    started.uses(tracking.prepared(settings, inputs), "training")
    write_text(folder.mlflow_run_id, started.run_id)
    return started
