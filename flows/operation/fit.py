"""Which overlay fits a model and a GPU: `agent-r1 fit MODEL --gpu 24`."""

from __future__ import annotations

from pathlib import Path

from rich.table import Column, Table
from transformers import PreTrainedConfig

from agent_r1 import params
from agent_r1.learn.fit import Fit, fit, remedy
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.pretrained import read_config, require_full_precision
from flows.overlay import of_models
from flows.policies import policy_of
from flows.terminal import show


def show_fits(word: str, gpu_gib: int, gpus: int) -> None:
    """Prints a row for each overlay: its lengths in tokens, GiB of each GPU, the longest that fit or what is short.

    Raises ValueError if there is no such model, or if no overlay fits, with the remedy that is nearest.
    """
    config = _config(policy_of(params.load(), word).path)
    numbers = [Column(name, justify="right") for name in ("context", "micro-batch", "GiB", "fits")]
    table = Table("overlay", "run", "trains", *numbers, box=None, padding=(0, 1))
    results = dict[str, Fit]()
    for name, settings in of_models().items():
        for run in settings.repro_runs:
            result = fit(config, _shared(settings, gpus), RunId(run), gpu_gib)
            results[f"{name} {run}"] = result
            context = settings.of(RunId(run)).env.max_tokens
            table.add_row(name, run, *_cells(result, context, gpu_gib))
    show(table)
    name = min(results, key=lambda name: results[name].need_gib)
    result = results[name]
    if result.need_gib > gpu_gib:
        short = f"{name} lacks least, {result.need_gib - gpu_gib:.1f} GiB"
        raise ValueError(f"nothing fits: {short}; {remedy(result, gpu_gib)}")


def _config(path: Path | str) -> PreTrainedConfig:
    try:
        config = read_config(path)
    except OSError as fault:
        raise ValueError(f"no config.json comes from {path}: {str(fault).splitlines()[0]}; name a folder") from fault
    require_full_precision(config)
    return config


def _cells(result: Fit, context: int, gpu_gib: int) -> list[str]:
    trains = "adapters" if result.demand.adapter else "weights"
    verdict = f"up to {result.longest:,}" if result.longest else f"{result.need_gib - gpu_gib:.1f} short"
    return [trains, f"{context:,}", f"{result.demand.tokens:,}", f"{result.need_gib:.1f}", verdict]


def _shared(settings: Params, gpus: int) -> Params:
    """Settings whose learner has a rank on each of so many GPUs of one machine."""
    learner = settings.learner
    shape = {
        "processes": gpus,
        "nodes": 1,
        "replicate": False,
        "defer_reduction": learner.defer_reduction and gpus > 1,
        "optimizer_offload": learner.optimizer_offload and gpus == 1,
    }
    return settings.model_copy(update={"learner": learner.model_copy(update=shape)})
