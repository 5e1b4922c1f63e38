"""Which overlay fits a model and a GPU: `agent-r1 fit MODEL --gpu 24`."""

from __future__ import annotations

from rich.table import Column, Table

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
    path = policy_of(params.load(), word).path
    try:
        config = read_config(path)
    except OSError as fault:
        raise ValueError(f"no config.json comes from {path}: {str(fault).splitlines()[0]}; name a folder") from fault
    require_full_precision(config)
    numbers = [Column(name, justify="right") for name in ("context", "micro-batch", "GiB", "fits")]
    shown = Table("overlay", "run", "trains", *numbers, box=None, padding=(0, 1))
    rows = list[tuple[str, Fit]]()
    for name, settings in of_models().items():
        for run in settings.repro_runs:
            result = fit(config, _shared(settings, gpus), RunId(run), gpu_gib)
            rows.append((f"{name} {run}", result))
            lengths = (f"{settings.of(RunId(run)).env.max_tokens:,}", f"{result.demand.tokens:,}")
            verdict = f"up to {result.longest:,}" if result.longest else f"{result.need_gib - gpu_gib:.1f} short"
            trains = "adapters" if result.demand.adapter else "weights"
            shown.add_row(name, run, trains, *lengths, f"{result.need_gib:.1f}", verdict)
    show(shown)
    name, result = min(rows, key=lambda row: row[1].need_gib)
    if result.need_gib > gpu_gib:
        short = f"{name} lacks least, {result.need_gib - gpu_gib:.1f} GiB"
        raise ValueError(f"nothing fits: {short}; {remedy(result, gpu_gib)}")


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
