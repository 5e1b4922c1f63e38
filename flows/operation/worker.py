"""A worker of a pool: makes stages for other clones in this one, `agent-r1 worker`."""

from __future__ import annotations

import logging
import os
import platform
import re

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.utilities.callables import parameter_schema

from agent_r1.harmless import without_password
from flows.errand import errand
from flows.operation.deploy import ensure_crash_detection, ensure_pool
from flows.operation.serving import POOL, keep_working, require_server, worker_part
from flows.pool import require_shared
from flows.processes import prefect_environment

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
IN_THE_CLONE = [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]

logger = logging.getLogger(__name__)


def work(pool: str, limit: int) -> None:
    """Puts a pool on the Prefect server where it is not there, and works for it until interrupted.

    The pool has no limit of its own; this worker makes `limit` stages at a time. One that dies is started again.
    Raises ValueError if the clone could not share what it makes.
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
    """Has the server take errands for a pool, and no other parameters than theirs."""
    ensure_pool(client, pool, None)
    ensure_crash_detection(client)
    client.create_deployment(
        flow_id=client.create_flow(errand),
        name=pool,
        description="A stage of the graph for another clone; `agent-r1 pipeline --pool` sends it.",
        work_pool_name=pool,
        path=".",
        entrypoint="flows.errand.errand",
        pull_steps=IN_THE_CLONE,
        parameter_openapi_schema=parameter_schema(errand).model_dump_for_openapi(),
        enforce_parameter_schema=True,
    )
