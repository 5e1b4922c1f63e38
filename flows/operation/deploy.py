"""Puts work pool, deployments, crash detection and limits on a Prefect server: `agent-r1 deploy`."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, ResumeFlowRun
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Crashed
from prefect.workers.process import ProcessWorker

from agent_r1 import params
from agent_r1.harmless import without_password
from agent_r1.params import Params
from flows.operation.promote import PROMOTION
from flows.operation.serving import POOL, require_server

FIXED: dict[str, Any] = {"command": None, "env": {}, "working_dir": "."}  # of every run, and not for its creator to set
EVALUATIONS = ("evaluation/nightly", "evaluation/after-training")
CONCURRENCY_LIMIT = 1  # runs at the same time; stages of one machine would wait for its accelerator anyway
SILENCE_S = 75  # a bit more than two heartbeats of a flow run; pyproject.toml sets their interval

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
    actions=[
        ChangeFlowRunState(
            name="Crashed",
            state=StateType.CRASHED,
            message=f"No sign of life for {SILENCE_S} s: its process is gone",
            force=False,
        )
    ],
)

logger = logging.getLogger(__name__)


def deploy(*, restarted: bool = False) -> None:
    """Brings the server up to date with prefect.yaml.

    `restarted` says that the server has no worker, so that nothing runs its unfinished runs.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise ValueError("PREFECT_API_URL is not set; set it, or run `make serve` for a server on this machine")
    require_server(url)
    with get_client(sync_client=True) as client:
        ensure_pool(client, POOL, CONCURRENCY_LIMIT)
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


def _offer_choices(client: SyncPrefectClient, settings: Params) -> None:
    """Limits the deployments to the runs and data sets of params.yaml, which the server's UI then lists."""
    datasets = ("dataset", [*settings.prepare.datasets])
    choices = {"training/training": ("run", [*settings.runs])} | dict.fromkeys(EVALUATIONS, datasets)
    for name, (parameter, offered) in choices.items():
        deployment = client.read_deployment_by_name(name)
        schema = deployment.parameter_openapi_schema or {}
        taken = schema["properties"][parameter]
        for kind in taken.get("anyOf", [taken]):  # an optional parameter is of two kinds
            kind |= {"enum": offered} if kind["type"] == "string" else {}
        client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=schema))


def _close_left_behind(client: SyncPrefectClient) -> None:
    """Shows unfinished runs of an earlier server as crashed: they would hold the pool's slots for ever."""
    unfinished = filters.FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    for run in client.read_flow_runs(
        work_pool_filter=filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[POOL])),
        flow_run_filter=filters.FlowRunFilter(state=filters.FlowRunFilterState(type=unfinished)),
    ):
        client.set_flow_run_state(run.id, Crashed(message="the server and its worker were ended"), force=True)
        logger.warning("run %s was not finished when the server ended: shown as crashed", run.name)


def ensure_pool(client: SyncPrefectClient, pool: str, limit: int | None) -> None:
    """Makes a work pool, or mends one whose runs may name a command; an existing limit stays.

    Raises ValueError if the pool is not for processes.
    """
    template = ProcessWorker.get_default_base_job_template()
    template["job_configuration"] |= FIXED
    for name in FIXED:
        del template["variables"]["properties"][name]
    try:
        client.create_work_pool(
            WorkPoolCreate(name=pool, type=ProcessWorker.type, base_job_template=template, concurrency_limit=limit)
        )
    except ObjectAlreadyExists:  # perhaps made by another worker that started at the same time
        found = client.read_work_pool(pool)
        if (kind := found.type) != ProcessWorker.type:
            raise ValueError(f"the pool {pool!r} of the server is of type {kind!r}; choose another name") from None
        if found.base_job_template != template:
            client.update_work_pool(pool, WorkPoolUpdate(base_job_template=template))


def ensure_automation(client: SyncPrefectClient, wanted: AutomationCore) -> None:
    """Puts an automation on the server. An equal one stays, since a new one would not know the runs it watches.

    If several workers put it there at the same time, all of them keep the same one.
    """
    found = client.read_automations_by_name(wanted.name)
    if not any(_equals(each, wanted) for each in found):
        client.create_automation(wanted)
        found = client.read_automations_by_name(wanted.name)  # others may have made some since
    kept = min(each.id for each in found if _equals(each, wanted))
    for each in found:
        if each.id != kept:
            with suppress(ObjectNotFound):
                client.delete_automation(each.id)


def _equals(found: Automation, wanted: AutomationCore) -> bool:
    return AutomationCore.model_validate(found.model_dump(exclude={"id"})) == wanted


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
