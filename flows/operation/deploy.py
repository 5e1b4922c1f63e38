"""Puts work pools, deployments, crash detection and limits on a Prefect server: `agent-r1 deploy`.

`agent-r1 worker` works for a pool there: it makes stages for other clones in this one.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections import ChainMap
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import State, StateType
from prefect.events.actions import ChangeFlowRunState, ResumeFlowRun
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Crashed, Failed
from prefect.utilities.callables import parameter_schema
from prefect.utilities.templating import apply_values
from prefect.workers.process import ProcessWorker

from agent_r1 import params
from agent_r1.harmless import without_password
from agent_r1.params.places import SWEEP
from flows import graph
from flows.dvc_files import collect_graph, require_dvc
from flows.operation.promote import PROMOTION
from flows.operation.serving import POOL, keep_working, require_server, worker_part
from flows.pipeline import reproduce
from flows.processes import prefect_environment
from flows.terminal import speak

EVALUATIONS = ("evaluation/nightly", "evaluation/after-training")
CONCURRENCY_LIMIT = 1  # runs at the same time; stages of one machine would wait for its accelerator anyway
OWN_RESULTS = "agent_r1.replaced.keep_results_own"  # before Prefect looks at the state of the run, as in prefect.yaml
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SILENCE_S = 150  # five heartbeats of a flow run, since a busy server is slow; prefect.toml sets their interval
_SILENT = f"No sign of life for {SILENCE_S} s: its process is gone"

CRASH_DETECTION = AutomationCore(
    name="agent_r1: silent runs have crashed",
    description="A run whose process was killed, or whose machine went away, cannot say so itself.",
    trigger=EventTrigger(
        posture=Posture.Proactive,
        match={"prefect.resource.id": "prefect.flow-run.*"},
        for_each={"prefect.resource.id"},
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.*"},  # another one, or its end
        threshold=1,
        within=timedelta(seconds=SILENCE_S),
    ),
    actions=[ChangeFlowRunState(name="Crashed", state=StateType.CRASHED, message=_SILENT, force=False)],
)

logger = logging.getLogger(__name__)


def deploy(*, restarted: bool = False) -> None:
    """Brings the server up to date with prefect.yaml; a `restarted` one has no worker for its unfinished runs."""
    url = PREFECT_API_URL.value()
    if not url:
        raise ValueError("PREFECT_API_URL is not set; set it, or run `agent-r1 serving` for a server on this machine")
    require_server(url)
    with get_client(sync_client=True) as client:
        ensure_pool(client, of_processes(POOL, CONCURRENCY_LIMIT))
        ensure_automation(client, CRASH_DETECTION)
        client.upsert_global_concurrency_limit_by_name(PROMOTION, 1)
        if restarted:
            _close_left_behind(client)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        raise ValueError(f"prefect deploy refused prefect.yaml:\n{result.stdout}")
    settings = params.load()
    with get_client(sync_client=True) as client:
        _offer_choices(client, settings)
        if hours := settings.promote.yes_within_h:
            ensure_automation(client, no_answer(client.read_deployment_by_name("promote/promote").id, hours))
    logger.info("work pool %s and the deployments of prefect.yaml are on %s", POOL, without_password(url))


def _offer_choices(client: SyncPrefectClient, settings: params.Params) -> None:
    """Limits the deployments to the runs and data sets of params.yaml, which the server's UI then lists."""
    datasets = ("dataset", [*settings.prepare.datasets])
    choices = {"training/training": ("run", [*settings.runs])} | dict.fromkeys(EVALUATIONS, datasets)
    for name, (parameter, values) in choices.items():
        deployment = client.read_deployment_by_name(name)
        schema = deployment.parameter_openapi_schema or {}
        parameter_schema = schema["properties"][parameter]
        for kind in parameter_schema.get("anyOf", [parameter_schema]):  # an optional parameter is of two kinds
            kind |= {"enum": values} if kind["type"] == "string" else {}
        client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=schema))


def _close_left_behind(client: SyncPrefectClient) -> None:
    """Shows unfinished runs of an earlier server as crashed: they would hold the pool's slots for ever."""
    unfinished = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
    pool_filter = WorkPoolFilter.model_validate({"name": {"any_": [POOL]}})
    run_filter = FlowRunFilter.model_validate({"state": {"type": {"any_": unfinished}}})
    for run in client.read_flow_runs(work_pool_filter=pool_filter, flow_run_filter=run_filter):
        client.set_flow_run_state(run.id, Crashed(message="the server and its worker were ended"), force=True)
        logger.warning("run %s was not finished when the server ended: shown as crashed", run.name)


def ensure_pool(client: SyncPrefectClient, pool: WorkPoolCreate) -> None:
    """Makes a work pool, or mends the template of one and keeps its limit; ValueError if it is of another type."""
    name = pool.name
    template = pool.base_job_template
    try:
        client.create_work_pool(pool)
    except ObjectAlreadyExists:  # perhaps made by another worker that started at the same time
        stored = client.read_work_pool(name)
        if stored.type != pool.type:
            raise ValueError(
                f"the pool {name!r} of the server is of type {stored.type!r}; choose another name"
            ) from None
        if stored.base_job_template != template:
            client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))


def of_processes(pool: str, limit: int | None) -> WorkPoolCreate:
    """A pool whose runs are processes in the clone of the worker."""
    template = closed(ProcessWorker.get_default_base_job_template(), {"env": {}, "working_dir": "."})
    return WorkPoolCreate(name=pool, type=ProcessWorker.type, base_job_template=template, concurrency_limit=limit)


def of_containers(pool: str, kind: str, template: dict[str, Any], image: str) -> WorkPoolCreate:
    """A pool whose runs are containers of an image; else they are as the operator's or Prefect's own template says.

    They get the MLFLOW_TRACKING_URI of this process, and PREFECT_API_URL from their worker.
    """
    uri = os.environ["MLFLOW_TRACKING_URI"]
    if uri != without_password(uri):
        raise ValueError("MLFLOW_TRACKING_URI has a password, and who reads the pool would; put it into the image")
    env = template["variables"]["properties"]["env"].get("default") or {}
    values = {"env": env | {"MLFLOW_TRACKING_URI": uri}, "image": image}
    return WorkPoolCreate(name=pool, type=kind, base_job_template=closed(template, values))


def closed(template: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A template whose runs choose nothing: its variables have `values` or their defaults, and there are no others."""
    properties = template["variables"]["properties"]
    defaults = {
        name: variable["default"] for name, variable in properties.items() if variable.get("default") is not None
    }
    configuration = apply_values(template["job_configuration"], {**defaults, **values})
    return {
        "variables": {"type": "object", "properties": {}, "additionalProperties": False},
        "job_configuration": configuration,
    }


def ensure_automation(client: SyncPrefectClient, expected: AutomationCore) -> None:
    """Puts an automation on the server, once for all workers; an equal one stays, with the runs that it watches."""
    automations = client.read_automations_by_name(expected.name)
    if not any(_equals(automation, expected) for automation in automations):
        client.create_automation(expected)
        automations = client.read_automations_by_name(expected.name)  # others may have made some since
    oldest = min(automation.id for automation in automations if _equals(automation, expected))
    for automation in automations:
        if automation.id != oldest:
            with suppress(ObjectNotFound):
                client.delete_automation(automation.id)


def _equals(automation: Automation, expected: AutomationCore) -> bool:
    return AutomationCore.model_validate(automation.model_dump(exclude={"id"})) == expected


def no_answer(promotion: UUID, hours: float) -> AutomationCore:
    """Resumes a promotion that nobody answered, by the id of its deployment; its form then stands at no."""
    waiting = {
        "match_related": {"prefect.resource.id": f"prefect.deployment.{promotion}"},
        "after": {"prefect.flow-run.Suspended"},
        "expect": {"prefect.flow-run.Resuming"},
        "within": timedelta(seconds=max(10, hours * 3600)),  # the server takes no less
    }
    trigger = EventTrigger.model_validate(CRASH_DETECTION.trigger.model_dump() | waiting)
    return AutomationCore(name="agent_r1: no answer is a no", trigger=trigger, actions=[ResumeFlowRun()])


@flow(name=graph.ERRAND)
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
    graph.require_shared()
    needs = graph.stages(collect_graph(Path(SWEEP)) if stage.startswith(f"{SWEEP}/") else "dvc.yaml")
    if stage not in needs or not graph.Pool.takes(stage):
        raise ValueError(f"this clone on {platform.node()} has no stage {stage!r:.200} for a pool; bring it up to date")
    state = graph.described(stage, *needs[stage])
    # First, so that a refused clone does not change:
    graph.require_alike(stage, made_of, state[stage].made_of, but=inputs)
    try:
        graph.bring({need: state[need] for need in needs[stage]}, inputs)
        graph.require_alike(stage, made_of, graph.described(stage)[stage].made_of)
        reproduce(stage)
        require_dvc("push", stage)
    except (graph.StageUnavailable, OSError) as fault:
        return Failed(name=graph.UNAVAILABLE, message=f"on {platform.node()}: {fault}")
    result = graph.described(stage)[stage]
    graph.require_alike(stage, made_of, result.made_of)
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(UUID(flow_run.id), dict(result.outs))
    return Completed(message=f"made on {platform.node()}")


def work(pool: str, limit: int) -> None:
    """Works for a pool of the Prefect server until interrupted; makes the pool if it is missing.

    The pool has no limit of its own; this worker makes `limit` stages at a time, and is started again if it dies.
    Raises ValueError if the clone could not share its outputs.
    """
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        raise ValueError("PREFECT_API_URL is not set; set it to the server that the pipeline reports to")
    _require_named(pool)
    graph.require_shared()
    require_server(url)
    with get_client(sync_client=True) as client:
        offer(client, of_processes(pool, None))
    logger.info("working for pool %s of %s, %d at a time; Ctrl-C ends it", pool, without_password(url), limit)
    name = f"{platform.node()}-{os.getpid()}"
    options = ["--limit", str(limit), "--name", name]
    keep_working(worker_part(f"worker-{name}", pool, prefect_environment(url), *options), [])


def offer_containers(pool: str, kind: str, image: str, file: Path | None) -> None:
    """Makes or mends a pool whose stages are made in containers of an image, for a worker of Prefect's own.

    The template is of a file, as `prefect work-pool get-default-base-job-template` writes it, or Prefect's own. Raises
    ValueError for another type, and if clones could not share their outputs.
    """
    _require_named(pool)
    graph.require_shared()
    with get_client(sync_client=True) as client:
        if file:
            template = json.loads(file.read_text())
        else:
            workers = ChainMap(*client.read_worker_metadata().values())
            template = workers[kind]["default_base_job_configuration"]
        offer(client, of_containers(pool, kind, template, image))
    logger.info("pool %s has stages made in %s; start a worker: prefect worker start --pool %s", pool, image, pool)


def _require_named(pool: str) -> None:
    if not _NAME.fullmatch(pool) or pool == POOL:
        remedy = f"take letters, digits, _ and -, but not {POOL}, of `agent-r1 serving`"
        raise ValueError(f"no pool can be called {pool!r}; {remedy}")


def offer(client: SyncPrefectClient, pool: WorkPoolCreate) -> None:
    """Makes a pool, and deploys the errand for it; the server refuses other parameters."""
    ensure_pool(client, pool)
    ensure_automation(client, CRASH_DETECTION)
    client.create_deployment(
        flow_id=client.create_flow(errand),
        name=pool.name,
        description="A stage of the graph for another clone; `agent-r1 pipeline --pool` sends it.",
        work_pool_name=pool.name,
        path=".",
        entrypoint="flows.operation.deploy.errand",
        pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": "."}}, {OWN_RESULTS: {}}],
        parameter_openapi_schema=parameter_schema(errand).model_dump_for_openapi(),
        enforce_parameter_schema=True,
    )
