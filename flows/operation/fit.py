"""Which overlay fits a model and a GPU: `agent-r1 fit MODEL --gpu 24`."""

from __future__ import annotations

from operator import itemgetter

from rich.table import Column, Table

from agent_r1 import params
from agent_r1.learn.fit import fit, remedy
from agent_r1.learn.memory import Demand
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
    rows = list[tuple[float, str, Demand]]()
    alone = {"defer_reduction": False} if gpus == 1 else {}
    for name, settings in of_models({"learner": {"processes": gpus, "nodes": 1, "replicate": False, **alone}}).items():
        for run in settings.repro_runs:
            demand, need_gib, longest = fit(config, settings, RunId(run), gpu_gib)
            short_gib = need_gib - gpu_gib
            rows.append((short_gib, f"{name} {run}", demand))
            lengths = (f"{settings.of(RunId(run)).env.max_tokens:,}", f"{demand.tokens:,}")
            verdict = f"up to {longest:,}" if longest else f"{short_gib:.1f} short"
            trains = "adapters" if demand.adapter else "weights"
            shown.add_row(name, run, trains, *lengths, f"{need_gib:.1f}", verdict)
    show(shown)
    least_gib, name, demand = min(rows, key=itemgetter(0))
    if least_gib > 0:
        raise ValueError(f"nothing fits: {name} lacks least, {least_gib:.1f} GiB; {remedy(demand, gpu_gib)}")
