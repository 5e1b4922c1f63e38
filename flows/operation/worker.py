"""A worker of a pool: makes stages for other clones in this one, `agent-r1 worker`."""

from __future__ import annotations

import logging
import os
import platform
import re
from pathlib import Path
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from prefect.utilities.callables import parameter_schema

from agent_r1.harmless import without_password
from agent_r1.params.places import SWEEP
from flows.dvc_files import collect_graph, require_dvc
from flows.graph import StageUnavailable, bring, described, require_alike, stages
from flows.operation.deploy import CRASH_DETECTION, ensure_automation, ensure_pool
from flows.operation.serving import POOL, keep_working, require_server, worker_part
from flows.pipeline import reproduce
from flows.pool import ERRAND, UNAVAILABLE, Pool, require_shared
from flows.processes import prefect_environment
from flows.terminal import speak

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
IN_THE_CLONE = [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]

logger = logging.getLogger(__name__)


@flow(name=ERRAND)
def errand(stage: str, made_of: dict[str, str], inputs: dict[str, str]) -> State[None]:
    """Makes one stage of the graph, as `dvc repro` would, for the clone that asked.

    The stage's inputs come from DVC's remote and are not made again, so they are the same bits. Its outputs are pushed
    there, and their hashes become labels of this flow run. Nothing is made if the stage depends on code or parameters
    that differ in this clone.

    Args:
        stage: its address in DVC, `train@ppo`, `ablations/dvc.yaml:train@ppo-0`.
        made_of: its command, parameters and the hashes of its dependencies in the clone that asks, by name.
        inputs: path -> DVC's hash, of the outputs of the stages that it depends on.
    """
    speak()
    require_shared()
    graph = stages(collect_graph(Path(SWEEP)) if stage.startswith(f"{SWEEP}/") else "dvc.yaml")
    if stage not in graph or not Pool.takes(stage):
        raise ValueError(f"this clone on {platform.node()} has no stage {stage!r:.200} for a pool; bring it up to date")
    known = described(stage, *graph[stage])
    require_alike(stage, made_of, known[stage].made_of, but=inputs)  # first, so that a refused clone does not change
    try:
        bring({need: known[need] for need in graph[stage]}, inputs)
        require_alike(stage, made_of, described(stage)[stage].made_of)
        reproduce(stage)
        require_dvc("push", stage)
    except (StageUnavailable, OSError) as fault:
        return Failed(name=UNAVAILABLE, message=f"on {platform.node()}: {fault}")
    made = described(stage)[stage]
    require_alike(stage, made_of, made.made_of)
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(UUID(flow_run.id), dict(made.outs))
    return Completed(message=f"made on {platform.node()}")


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
    ensure_automation(client, CRASH_DETECTION)
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
