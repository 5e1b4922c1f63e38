"""Which runs a GPU has room for: the estimate of their memory, asked without a GPU and without weights."""

from __future__ import annotations

from bisect import bisect_right
from collections import ChainMap
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from agent_r1.learn.memory import Demand, demand_of, total_gib
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.params.stages import LoraParams

STEP = 256  # tokens between two lengths that are tried
CHANGES: dict[str, dict[str, Any]] = {  # of a demand, by the setting that makes them, the slightest first
    "model.gradient_checkpointing: true": {"gradient_checkpointing": True},
    "engine.vllm.sleep: true": {"sampler_sleeps": True},
    "an estimator without a critic": {"critic": False},
    "model.lora.rank: 64": {"adapter": LoraParams(rank=64, alpha=128, targets=["all-linear"])},
}


class Fit(NamedTuple):
    """A run's demand, the GiB that it takes of each GPU, and the longest contexts and micro-batches that fit."""

    demand: Demand
    need_gib: float
    longest: int  # tokens, a multiple of STEP, as the model's window allows; 0 for none


def fit(config: PretrainedConfig, settings: Params, run: RunId, gpu_gib: float) -> Fit:
    """Compares a run of params.yaml with GPUs of so much memory, one for each rank of the learner."""
    demand = demand_of(config, settings, run, torch.device("cuda"), gpu_gib)
    lengths = range(STEP, config.get_text_config().max_position_embeddings + 1, STEP)
    fitting = bisect_right(lengths, gpu_gib, key=lambda n: total_gib(replace(demand, tokens=n, context=n)))
    return Fit(demand, total_gib(demand), STEP * fitting)


def remedy(result: Fit, gpu_gib: float) -> str:
    """The lengths that fit, or the first setting with which a demand does; else what it takes with all of them."""
    if result.longest:
        return f"contexts and micro-batches of {result.longest:,} tokens fit"
    demand = result.demand
    for name, change in CHANGES.items():
        if total_gib(replace(demand, **change)) <= gpu_gib:
            return f"set {name}"
    all_gib = total_gib(replace(demand, **ChainMap(*CHANGES.values())))
    return f"take larger GPUs or a smaller model: with {', '.join(CHANGES)} it takes {all_gib:.1f} GiB"
