"""A worker of a pool: makes stages for other clones in this one, `agent-r1 worker`."""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from prefect import flow
from prefect.artifacts import Artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from prefect.utilities.callables import parameter_schema

from agent_r1.harmless import without_password
from agent_r1.params.places import SWEEP
from flows.dvc_files import collect_graph
from flows.graph import LockEntry, Made, StageUnavailable, adopt, described, entry_of, push, require_alike, stages
from flows.operation.deploy import ensure_crash_detection, ensure_pool
from flows.operation.serving import POOL, keep_working, require_server, worker_part
from flows.pipeline import reproduce
from flows.pool import ERRAND, HANDED_BACK, UNAVAILABLE, Pool, require_shared
from flows.processes import prefect_environment
from flows.terminal import speak

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
IN_THE_CLONE = [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]

logger = logging.getLogger(__name__)


@flow(name=ERRAND)
def errand(stage: str, made: Made, entries: dict[str, LockEntry]) -> State[None]:
    """Makes one stage of the graph, as `dvc repro` would, and leaves its entry of dvc.lock for the clone that asked.

    The stage's inputs come from DVC's remote and are not made again, so they are the same bits; its outputs are pushed
    there. Nothing is made if the stage depends on code or parameters that differ in this clone.

    Args:
        stage: its address in DVC, `train@ppo`, `ablations/dvc.yaml:train@ppo-0`.
        made: its command, dependencies and parameters in the clone that asks.
        entries: the dvc.lock entries of the stages that it depends on, by name.
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
    entry = LockEntry.model_validate(known.locked)
    require_alike(stage, made, entry)
    said = Artifact(type="json", key=HANDED_BACK, data=entry_of(entry), description=f"dvc.lock of {stage}")
    said.create()
    return Completed(message=f"made on {platform.node()}")


def require_known(stage: str, entries: Mapping[str, LockEntry]) -> None:
    """Raises ValueError unless this clone's graph has the stage, for a pool, with exactly these dependencies."""
    graph = stages(collect_graph(Path(SWEEP)) if stage.startswith(f"{SWEEP}/") else "dvc.yaml")
    if stage not in graph or not Pool.takes(stage):
        raise ValueError(f"this clone on {platform.node()} has no stage {stage!r:.200} for a pool; bring it up to date")
    if {*entries} != graph[stage]:
        raise ValueError(f"{stage} depends on {sorted(graph[stage])}, and comes with {sorted(entries)}")


def _bring_what_it_needs(stage: str, made: Made, entries: Mapping[str, LockEntry]) -> None:
    """Brings the inputs of a stage here. Compares both clones first, so that a refused clone does not change."""
    to_come = [out.path for entry in entries.values() for out in entry.outs]
    require_alike(stage, made, described(stage)[stage].made, to_come)
    if entries:
        adopt(entries)
    require_alike(stage, made, described(stage)[stage].made)


def work(pool: str, limit: int) -> None:
    """Works for a pool of the Prefect server until interrupted; makes the pool if it is missing.

    The pool has no limit of its own; this worker makes `limit` stages at a time, and is started again if it dies.
    Raises ValueError if the clone could not share its outputs.
    """
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        raise ValueError("PREFECT_API_URL is not set; set it to the server that the pipeline reports to")
    if not _NAME.fullmatch(pool) or pool == POOL:
        raise ValueError(
            f"no pool can be called {pool!r}; take letters, digits, _ and -, but not {POOL}, of `make serve`"
        )
    require_shared()
    require_server(url)
    with get_client(sync_client=True) as client:
        offer(client, pool)
    logger.info("working for pool %s of %s, %d at a time; Ctrl-C ends it", pool, without_password(url), limit)
    name = f"{platform.node()}-{os.getpid()}"
    options = ["--limit", str(limit), "--name", name]
    keep_working(worker_part(f"worker-{name}", pool, prefect_environment(url), *options), [])


def offer(client: SyncPrefectClient, pool: str) -> None:
    """Deploys the errand for a pool; the server refuses other parameters."""
    ensure_pool(client, pool, None)
    ensure_crash_detection(client)
    client.create_deployment(
        flow_id=client.create_flow(errand),
        name=pool,
        description="A stage of the graph for another clone; `agent-r1 pipeline --pool` sends it.",
        work_pool_name=pool,
        path=".",
        entrypoint="flows.operation.worker.errand",
        pull_steps=IN_THE_CLONE,
        parameter_openapi_schema=parameter_schema(errand).model_dump_for_openapi(),
        enforce_parameter_schema=True,
    )
