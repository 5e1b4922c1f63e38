"""The warm start stage: `agent-r1 warm_start`."""

from __future__ import annotations

import logging

import torch
from transformers import AutoConfig

from agent_r1 import params
from agent_r1.files import load_pretrained, replaced_folder
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.policy import memory
from agent_r1.policy.adapter import save_merged
from agent_r1.policy.model import compute_dtype, default_device, load_policy, load_tokenizer
from agent_r1.records import Passage, Question
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows
from agent_r1.training.warm_start import train_on_demonstrations
from flows.accelerator import accelerator

logger = logging.getLogger(__name__)


def warm_start() -> None:
    """Writes the policy that reinforcement learning starts from, as a Hugging Face folder.

    Without `model.path` it is the built-in small model, trained from scratch on demonstrations and conversations; with
    it, that model, passed through or, with `warm_start.fine_tune`, trained on them too.
    """
    settings = params.load()
    places = settings.places
    with accelerator(settings.operate.side_by_side):
        if settings.model.path:
            _check_memory(settings, settings.model.path)
        if settings.model.path and not settings.warm_start.fine_tune:
            tokenizer = load_tokenizer(settings.model.path)
            model = load_policy(settings.model.path, "auto", torch.device("cpu"))
            logger.info("passing %s through", settings.model.path)
        else:
            model, tokenizer = train_on_demonstrations(
                settings,
                [row for row in read_rows(places.questions, Question) if row.split == "train"],
                read_rows(places.passages, Passage),
                open_index(settings.search, places.passages, places.index),
            )
        with replaced_folder(places.warm_start) as fresh:
            save_merged(model, fresh)
            tokenizer.save_pretrained(fresh)


def _check_memory(settings: Params, path: str) -> None:
    """Refuses a model that is too large for this machine, before it is loaded: for the runs, and to be fine-tuned."""
    config = load_pretrained(AutoConfig, path)
    memory.check(config, settings, [RunId(run) for run in settings.repro_runs])
    if settings.warm_start.fine_tune:
        tokens = max(settings.warm_start.max_tokens_per_microbatch, settings.env.max_tokens)
        device, model = default_device(), settings.model
        demand = memory.Demand(
            model=config,
            tokens=tokens,
            dtype=compute_dtype(model.dtype, device),
            adapter=model.adapter,
            gradient_checkpointing=model.gradient_checkpointing,
        )
        memory.require_fit(memory.estimate(demand), memory.available_gib(device))
