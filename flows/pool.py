"""Stages that other clones make: sent to a work pool of the Prefect server, their outputs brought back."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from httpx import HTTPError, HTTPStatusError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import task_run

from agent_r1.harmless import harmless
from flows.dvc_files import require_dvc, run_dvc
from flows.graph import StageFailed, StageUnavailable, bring, described, require_alike
from flows.terminal import SideBySide

# Stages that hold an accelerator. The others take seconds, or write files that git keeps.
SENT = ("warm_start", "train", "train_closer", "evaluate", "evaluate_closer", "baseline")
ERRAND = "errand"  # the flow of a worker, deployed under the name of its pool
UNAVAILABLE = "Unavailable"  # the state of an errand that may work later
POLL_S = 3.0
TELL_S = 60.0

logger = logging.getLogger(__name__)


def require_shared() -> None:
    """Raises ValueError unless other clones can get this clone's outputs, and see its runs."""
    if run_dvc("remote", "default"):
        raise ValueError(
            "a pool's clones bring each other what they make by DVC's default remote, and there is none; "
            "`dvc remote add -d storage URL`, the same in every clone (docs/registry.md, Remotes)"
        )
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ValueError("a pool's clones share one MLflow; set MLFLOW_TRACKING_URI to the same server in every clone")


class Pool:
    """A work pool: sends it stages, waits for them, and takes over their outputs."""

    def __init__(self, name: str, patience_s: float) -> None:
        """Raises ValueError if the server has no such pool, or its clones could not share their outputs.

        A stage fails after `patience_s` without a worker.
        """
        require_shared()
        self._name, self._patience_s, self._told = name, patience_s, 0.0
        self._pushed, self._asking = set[str](), threading.Lock()  # DVC's commands would wait for each other
        with get_client(sync_client=True) as client:
            try:
                self._deployment = client.read_deployment_by_name(f"{ERRAND}/{name}").id
                self._has_worker(client)
            except (ObjectNotFound, HTTPStatusError):
                raise ValueError(f"the server has no pool {name!r} with workers; {self._start_one}") from None

    @staticmethod
    def takes(stage: str) -> bool:
        """Whether a stage of a graph is one for a pool."""
        return stage.rpartition(":")[2].partition("@")[0] in SENT

    def make(self, stage: str, needs: set[str], beside: SideBySide) -> None:
        """Has a worker make a stage, and takes over its outputs; its inputs are pushed first.

        An errand that an interrupted run sent is waited for and not sent again. Raises StageFailed if the stage fails,
        is cancelled, or finds no worker, and StageUnavailable if it may work later.
        """
        try:
            asked = self._asked(stage, needs)
            with get_client(sync_client=True) as client, beside.line(stage) as show:
                run = self._ended(client, self._sent(client, stage, asked), beside.over, show)
            known = described(stage)
            require_alike(stage, asked["made_of"], known[stage].made_of)
            bring(known, run.labels)
            require_alike(stage, asked["made_of"], described(stage)[stage].made_of)  # that may have taken minutes
            require_dvc("commit", "--force", stage)
        except (HTTPError, PrefectException, OSError) as fault:
            raise StageUnavailable(f"stage {stage} of pool {self._name}: {fault}") from fault
        except ValueError as fault:
            raise StageFailed(f"stage {stage} of pool {self._name}: {fault}") from fault

    @property
    def _start_one(self) -> str:
        return f"start one in a clone of this commit: `agent-r1 worker --pool {self._name}`"

    def _asked(self, stage: str, needs: set[str]) -> dict[str, Any]:
        """The parameters of an errand. Pushes the inputs of the stage."""
        with self._asking:
            if lacking := sorted(needs - self._pushed):
                require_dvc("push", *lacking)
                self._pushed |= needs
            known = described(stage, *needs)
        inputs = {path: md5 for need in needs for path, md5 in known[need].outs.items()}
        return {"stage": stage, "made_of": known[stage].made_of, "inputs": inputs}

    def _sent(self, client: SyncPrefectClient, stage: str, asked: dict[str, Any]) -> FlowRun:
        """The running or complete errand of these parameters, or a new one."""
        content = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        attempt = 0
        while True:
            run = client.create_flow_run_from_deployment(
                self._deployment,
                parameters=asked,
                name=stage,
                idempotency_key=f"{self._name}-{content}-{attempt}",
                parent_task_run_id=UUID(task_run.id) if task_run.id else None,
            )
            if run.state is None or not run.state.is_final() or run.state.is_completed():
                logger.info("stage %s is for pool %s", stage, self._name)
                return run
            attempt += 1

    def _ended(
        self, client: SyncPrefectClient, run: FlowRun, over: threading.Event, show: Callable[[str], None]
    ) -> FlowRun:
        """Waits for the end of an errand, which has the name of its stage."""
        until, stage = time.monotonic() + self._patience_s, run.name
        while run.state is None or not run.state.is_final():
            has_begun = run.state is not None and run.state.type in (StateType.RUNNING, StateType.CANCELLING)
            show(f"{stage}: {'is made' if has_begun else 'waits'} in pool {self._name}")
            if has_begun or self._has_worker(client):
                until = time.monotonic() + self._patience_s
            elif time.monotonic() > until:
                raise StageFailed(
                    f"no worker of pool {self._name} was there for {self._patience_s:g} s (operate.pool_patience_s); "
                    f"{self._start_one}; stage {stage} stays in the queue, and the same command waits for it"
                )
            if over.wait(POLL_S):
                raise StageFailed(f"stage {stage} stays with pool {self._name}; the same command waits for it")
            run = client.read_flow_run(run.id)
        if not run.state.is_completed():
            may_work = run.state.is_crashed() or run.state.name == UNAVAILABLE
            fault = StageUnavailable if may_work else StageFailed
            said = harmless(f"{run.state.name}, {run.state.message or 'without a word'}")
            raise fault(f"stage {stage} of pool {self._name} is {said} (flow run {run.id})")
        return run

    def _has_worker(self, client: SyncPrefectClient) -> bool:
        """Whether the pool has a worker; if not, a log line every `TELL_S` says how to start one."""
        if any(worker.status == WorkerStatus.ONLINE for worker in client.read_workers_for_work_pool(self._name)):
            return True
        if not self._told or time.monotonic() > self._told + TELL_S:
            self._told = time.monotonic()
            logger.warning("no worker of pool %s is there; %s", self._name, self._start_one)
        return False
