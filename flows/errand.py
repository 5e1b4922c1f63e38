"""What a worker of a pool does: one stage that another clone asks for, made in this one."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from prefect import flow
from prefect.artifacts import Artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.dvc_files import collect_graph
from flows.dvc_lock import Entry, Made, adopt, described, entry_of, push, require_alike
from flows.graph import StageUnavailable, stages
from flows.pipeline import reproduce
from flows.pool import ERRAND, HANDED_BACK, UNAVAILABLE, Pool, require_shared
from flows.terminal import speak

SWEEP = "ablations"


@flow(name=ERRAND)
def errand(stage: str, made: Made, entries: dict[str, Entry]) -> State[None]:
    """Makes one stage of the graph, as `dvc repro` would, and leaves its entry of dvc.lock for the clone that asked.

    What the stage needs is brought from DVC's remote and not made again, so that it is the same bits; what it makes is
    pushed there. Nothing is made where this clone is of another commit or other parameters, as far as the stage depends
    on them.

    Args:
        stage: as DVC addresses it, `train@ppo`, `ablations/dvc.yaml:train@ppo-0`.
        made: its command, dependencies and parameters in the clone that asks.
        entries: of dvc.lock, those of the stages that it depends on, by their names.
    """
    speak()
    require_shared()
    require_known(stage, entries)
    try:
        _bring_what_it_needs(stage, made, entries)
        reproduce(stage)
        push(stage)
    except (StageUnavailable, OSError) as fault:
        return Failed(name=UNAVAILABLE, message=f"on {platform.node()}: {fault}")
    [known] = described(stage).values()
    entry = Entry.model_validate(known.locked)
    require_alike(stage, made, entry)
    said = Artifact(type="json", key=HANDED_BACK, data=entry_of(entry), description=f"dvc.lock of {stage}")
    said.create()
    return Completed(message=f"made on {platform.node()}")


def require_known(stage: str, entries: Mapping[str, Entry]) -> None:
    """Checks that a stage is one for a pool in this clone's graph, and comes with what it needs, and nothing else."""
    graph = stages(collect_graph(Path(SWEEP)) if stage.startswith(f"{SWEEP}/") else "dvc.yaml")
    if stage not in graph or not Pool.takes(stage):
        raise ValueError(f"this clone on {platform.node()} has no stage {stage!r:.200} for a pool; bring it up to date")
    if {*entries} != graph[stage]:
        raise ValueError(f"{stage} depends on {sorted(graph[stage])}, and comes with {sorted(entries)}")


def _bring_what_it_needs(stage: str, made: Made, entries: Mapping[str, Entry]) -> None:
    """Looks at what is here first: a clone that is refused stays as it is."""
    to_come = [out.path for entry in entries.values() for out in entry.outs]
    require_alike(stage, made, described(stage)[stage].made, to_come)
    if entries:
        adopt(entries)
    require_alike(stage, made, described(stage)[stage].made)
