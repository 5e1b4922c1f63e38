"""The warm start stage: `agent-r1 warm_start`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from agent_r1 import params
from agent_r1.devices.sharing import Ranks
from agent_r1.files import load_pretrained, model_hash, remove_folder, replaced_folder, trained_alone, write_sums
from agent_r1.identity import Identity
from agent_r1.learn import memory
from agent_r1.learn.adapter import save_merged
from agent_r1.learn.model import load_policy, load_tokenizer
from agent_r1.params.places import RunId
from agent_r1.params.sections import flatten
from agent_r1.pretrained import compute_dtype, default_device, require_window
from agent_r1.records import Passage, Question
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows
from agent_r1.teaching.supervised import Unfinished
from agent_r1.teaching.warm_start import train_on_demonstrations, train_with_leader
from agent_r1.tools.toolbox import require_own
from agent_r1.training.fitness import require_fit
from flows import ranks
from flows.made_of import code_of, require_unedited
from flows.ranks import facts_of, following, leading
from flows.stage import accelerator

logger = logging.getLogger(__name__)


def warm_start() -> None:
    """Writes the policy that reinforcement learning starts from, as a Hugging Face folder.

    Without `model.path` it trains the built-in small model from scratch on demonstrations and conversations. With it,
    that model is passed through, or trained on them too if `warm_start.fine_tune` is set. The ranks of `learner` share
    the training, and one that was killed goes on where it was.
    """
    settings = params.load()
    settings.require_watched()
    trains = _trains(settings)
    if trains:
        # before anything is waited for
        require_own(settings.env)
    with accelerator(settings.operate.side_by_side, settings.learner.processes if trains else 1):
        if settings.model.path:
            _check_memory(settings, settings.model.path)
        if trains:
            unfinished = _unfinished(settings)
            seed = settings.warm_start.seed
            with leading(settings.learner, _facts(settings, unfinished), seed) as group:
                _train(settings, unfinished, group)
        else:
            tokenizer = load_tokenizer(settings.model.path, template=settings.model.template)
            model = load_policy(settings.model.path, "auto", torch.device("cpu"))
            logger.info("passing %s through", settings.model.path)
            _write(model, tokenizer, settings)


def _trains(settings: params.Params) -> bool:
    return not settings.model.path or settings.warm_start.fine_tune


def _train(settings: params.Params, unfinished: Unfinished, group: Ranks) -> None:
    places = settings.places
    with trained_alone(places.warm_start):
        model, tokenizer = train_on_demonstrations(
            settings,
            read_rows(places.questions, Question),
            read_rows(places.passages, Passage),
            open_index(settings.search, places.passages, places.index),
            ranks=group,
            unfinished=unfinished,
        )
        _write(model, tokenizer, settings)
        require_unedited()  # DVC removes a model that it does not record; this is gone on from
        remove_folder(unfinished.folder)


def _unfinished(settings: params.Params) -> Unfinished:
    """The folder of the warm start's progress, told apart by its parameters and the model that it begins from."""
    places = settings.places
    model = settings.model.path
    sections = {
        "warm_start": settings.warm_start.model_dump(mode="json"),
        "model": settings.model.model_dump(mode="json"),
    }
    inputs = {"model": model_hash(model)} if model else {}
    identity = Identity(parameters=flatten(sections), inputs=inputs, code=code_of("warm_start"))
    return Unfinished(places.unfinished_warm_start, places.aside, settings.warm_start.checkpoint_every, identity)


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, settings: params.Params) -> None:
    with replaced_folder(settings.places.warm_start) as fresh:
        save_merged(model, fresh)
        if settings.model.base == "four_bit":
            from agent_r1.learn.four_bit import round_off  # with bitsandbytes

            round_off(fresh)
        tokenizer.save_pretrained(fresh)
        write_sums(fresh)


def start() -> None:
    """Runs the stage, by ranks if it trains and the learner asks for them, or follows its leader in one of these."""
    settings = params.load()
    learner = settings.learner if _trains(settings) else None
    lock = partial(accelerator, settings.operate.side_by_side, settings.learner.processes)
    ranks.start(warm_start, _follow, learner, ("warm_start",), lock)


def _follow() -> None:
    """Trains with the leader, and hands over its part of the model."""
    settings = params.load()
    if not _trains(settings):
        return
    unfinished = _unfinished(settings)
    with following(settings.learner, _facts(settings, unfinished)) as (group, _):
        model = train_with_leader(settings, group, unfinished)
        save_merged(model, settings.places.warm_start, writes=False)
        group.hear()  # the leader says that it has written the model, and has no more to do


def _facts(settings: params.Params, unfinished: Unfinished) -> Callable[[], dict[str, str]]:
    return partial(facts_of, "warm_start", (settings,), unfinished.identity.inputs.get("model", "built in"))


def _check_memory(settings: params.Params, path: str) -> None:
    """Refuses a model that reads too little, or is too large for the runs or fine-tuning, before it is loaded."""
    require_fit(path, settings)
    config = load_pretrained(AutoConfig, path)
    runs = [RunId(run) for run in settings.repro_runs]
    require_window(config, max(settings.of(run).env.max_tokens for run in runs))
    memory.check(config, settings, runs)
    if settings.warm_start.fine_tune:
        tokens = max(settings.warm_start.max_tokens_per_microbatch, settings.env.max_tokens)
        device = default_device()
        model = settings.model
        demand = memory.Demand(
            model=config,
            tokens=tokens,
            device=device.type,
            dtype=compute_dtype(model.dtype, device),
            adapter=model.adapter,
            gradient_checkpointing=model.gradient_checkpointing,
            optimizer_offload=settings.learner.optimizer_offload and device.type == "cuda",
            ranks=settings.learner.ranks,
        )
        parts = memory.on_machine(memory.estimate(demand), settings.learner.processes, device)
        memory.require_fit(parts, memory.available_gib(device))
