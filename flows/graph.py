"""DVC's graphs: their stages, and the stages that other clones make, whose outputs are brought back."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from graphlib import TopologicalSorter
from typing import Any, NamedTuple
from uuid import UUID

from httpx import HTTPError, HTTPStatusError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import task_run

from agent_r1 import params
from agent_r1.facts import differences, differing, some
from agent_r1.harmless import harmless
from flows.dvc_files import ask_dvc, complaint, in_dvc, require_dvc, require_listing, run_dvc
from flows.made_of import stage_of
from flows.terminal import SideBySide

# Stages that hold an accelerator. The others take seconds, or write files that git keeps.
SENT = ("warm_start", "train", "train_closer", "evaluate", "evaluate_closer", "baseline")
ERRAND = "errand"  # the flow of a worker, deployed under the name of its pool
UNAVAILABLE = "Unavailable"  # the state of an errand that may work later
POLL_S = 3.0
TELL_S = 60.0
_MD5 = re.compile(r"[0-9a-f]{32}(\.dir)?")

logger = logging.getLogger(__name__)


class StageFailed(RuntimeError):
    """A stage ended with an error that it has already explained."""


class StageUnavailable(StageFailed):
    """A stage ended because of a file or a server; the same may work later."""


def stages(file: str) -> dict[str, set[str]]:
    """The stages of a dvc.yaml and their dependencies in other files: stage -> its direct dependencies.

    Raises ValueError if params.yaml or the graph is not valid.
    """
    return edges(_answer("dag", "--dot", file))


def edges(dot: str) -> dict[str, set[str]]:
    """The nodes of a graph in the DOT language, each with its predecessors."""
    predecessors: dict[str, set[str]] = {}
    for line in dot.splitlines():
        nodes = re.findall(r'"([^"]+)"', line)  # a node, or two of an edge
        for node in nodes:
            predecessors.setdefault(node, set()).update(nodes[:-1] if node == nodes[-1] else ())
    return predecessors


def waiting(needs: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """For every stage, all stages that have to wait for its end."""
    behind: dict[str, set[str]] = {stage: set() for stage in needs}
    for stage in reversed([*TopologicalSorter(needs).static_order()]):
        for need in needs[stage]:
            behind[need] |= {stage, *behind[stage]}
    return behind


def out_of_date(*targets: str) -> set[str]:
    """The stages that DVC would run. Raises ValueError if params.yaml or the graph is not valid."""
    return {*json.loads(_answer("status", "--json", *targets))}


def _answer(*arguments: str) -> str:
    params.load()  # checks the names that DVC puts into commands
    process = ask_dvc(*arguments)
    if process.returncode:
        raise ValueError(f"dvc {arguments[0]} failed: {process.stderr.strip()}")
    return process.stdout


class Described(NamedTuple):
    """A clone's state of a stage."""

    made_of: dict[str, str]  # its command, parameters and the hashes of its dependencies that are there now, by name
    outs: dict[str, str]  # path -> DVC's hash in dvc.lock; "" if the stage is not in it


def described(*stages: str) -> dict[str, Described]:
    """This clone's state of stages. Raises ValueError if its graph cannot be read, or lacks one of them."""
    process = in_dvc("describe", *stages)
    if failed := complaint(process):
        raise ValueError(f"DVC cannot tell of {', '.join(stages)}: {failed}")
    return {stage: Described(*fields) for stage, fields in json.loads(process.stdout).items()}


def require_alike(stage: str, other: Mapping[str, str], local: Mapping[str, str], but: Iterable[str] = ()) -> None:
    """Raises ValueError with the differences if a stage is made of something else in another clone.

    Dependencies that are, contain, or lie in one of the paths `but` are left out.
    """
    paths = [*but]
    names = [name for name in differing(other, local) if not any(_meet(name, path) for path in paths)]
    if names:
        first, second = ({name: facts[name] for name in names if name in facts} for facts in (other, local))
        difference = harmless(some(differences(first, second)))
        remedy = "bring both clones to the same commit and the same params.yaml"
        raise ValueError(f"{stage} is made of something else there than here: {difference}; {remedy}")


def bring(stages: Mapping[str, Described], hashes: Mapping[str, object]) -> None:
    """Puts the outputs of stages into their places, from DVC's cache or its remote; dvc.lock stays as it is.

    Args:
        stages: as `described` has them.
        hashes: path -> DVC's hash, as another clone says; nothing but this clone's own outputs is looked up in it.

    Raises ValueError if an output has no valid hash, or the listing of a folder is not valid. Raises OSError if the
    remote lacks an output or has another one, or if DVC cannot put it into its place.
    """
    md5s = {path: hashes.get(path) for stage in stages.values() for path in stage.outs}
    for path, md5 in md5s.items():
        if not isinstance(md5, str) or not _MD5.fullmatch(md5):
            value = harmless(f"{md5!r:.80}")
            remedy = "delete its flow run in Prefect to have it made again"
            raise ValueError(f"{path} comes with no hash of DVC's but {value}; {remedy}")
    listings = [md5 for md5 in map(str, md5s.values()) if md5.endswith(".dir")]
    failed = next(filter(None, map(require_listing, listings)), "")
    failed = failed or complaint(in_dvc("bring", *stages, text=json.dumps(md5s)))
    if failed:
        raise OSError(f"{', '.join(md5s)} could not be brought here from DVC's remote ({failed})")


def _meet(first: str, second: str) -> bool:
    """Whether two paths are equal, or one is inside the other."""
    return f"{first}/".startswith(f"{second}/") or f"{second}/".startswith(f"{first}/")


def require_shared() -> None:
    """Raises ValueError unless other clones can get this clone's outputs, and see its runs."""
    if run_dvc("remote", "default"):
        remedy = "`dvc remote add -d storage URL`, the same in every clone (docs/registry.md, Remotes)"
        shared = "a pool's clones bring each other what they make by DVC's default remote"
        raise ValueError(f"{shared}, and there is none; {remedy}")
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ValueError("a pool's clones share one MLflow; set MLFLOW_TRACKING_URI to the same server in every clone")


class Pool:
    """A work pool: sends it stages, waits for them, and takes over their outputs."""

    def __init__(self, name: str, patience_s: float) -> None:
        """Raises ValueError if the server has no such pool, or its clones could not share their outputs.

        A stage fails after `patience_s` without a worker.
        """
        require_shared()
        self._name = name
        self._patience_s = patience_s
        self._warned_s = 0.0
        self._start_one = f"start one in a clone of this commit: `agent-r1 worker --pool {name}`"
        self._pushed = set[str]()
        self._describing = threading.Lock()  # DVC's commands would wait for each other
        with get_client(sync_client=True) as client:
            try:
                self._deployment = client.read_deployment_by_name(f"{ERRAND}/{name}").id
                self._has_worker(client)
            except (ObjectNotFound, HTTPStatusError):
                raise ValueError(f"the server has no pool {name!r} with workers; {self._start_one}") from None

    @staticmethod
    def takes(stage: str) -> bool:
        """Whether a stage of a graph is one for a pool."""
        return stage_of(stage) in SENT

    def make(self, stage: str, needs: set[str], beside: SideBySide) -> None:
        """Has a worker make a stage, and takes over its outputs; its inputs are pushed first.

        An errand that an interrupted run sent is waited for and not sent again. Raises StageFailed if the stage fails,
        is cancelled, or finds no worker, and StageUnavailable if it may work later.
        """
        try:
            parameters = self._parameters(stage, needs)
            with get_client(sync_client=True) as client, beside.line(stage) as show:
                run = self._finished(client, self._errand(client, stage, parameters), beside.over, show)
            stages = described(stage)
            require_alike(stage, parameters["made_of"], stages[stage].made_of)
            bring(stages, run.labels)
            require_alike(stage, parameters["made_of"], described(stage)[stage].made_of)  # that may have taken minutes
            require_dvc("commit", "--force", stage)
        except (HTTPError, PrefectException, OSError) as fault:
            raise StageUnavailable(f"stage {stage} of pool {self._name}: {fault}") from fault
        except ValueError as fault:
            raise StageFailed(f"stage {stage} of pool {self._name}: {fault}") from fault

    def _parameters(self, stage: str, needs: set[str]) -> dict[str, Any]:
        """The parameters of an errand. Pushes the inputs of the stage."""
        with self._describing:
            if lacking := sorted(needs - self._pushed):
                require_dvc("push", *lacking)
                self._pushed |= needs
            stages = described(stage, *needs)
        inputs = {path: md5 for need in needs for path, md5 in stages[need].outs.items()}
        return {"stage": stage, "made_of": stages[stage].made_of, "inputs": inputs}

    def _errand(self, client: SyncPrefectClient, stage: str, parameters: dict[str, Any]) -> FlowRun:
        """The running or complete errand of these parameters, or a new one."""
        content = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()
        attempt = 0
        while True:
            key = f"{self._name}-{content}-{attempt}"
            parent = UUID(task_run.id) if task_run.id else None
            run = client.create_flow_run_from_deployment(
                self._deployment, parameters=parameters, name=stage, idempotency_key=key, parent_task_run_id=parent
            )
            if run.state is None or not run.state.is_final() or run.state.is_completed():
                logger.info("stage %s is for pool %s", stage, self._name)
                return run
            attempt += 1

    def _finished(
        self, client: SyncPrefectClient, run: FlowRun, stop: threading.Event, show: Callable[[str], None]
    ) -> FlowRun:
        """Waits for the end of an errand, which has the name of its stage."""
        until = time.monotonic() + self._patience_s
        stage = run.name
        while run.state is None or not run.state.is_final():
            is_running = run.state is not None and run.state.type in (StateType.RUNNING, StateType.CANCELLING)
            show(f"{stage}: {'is made' if is_running else 'waits'} in pool {self._name}")
            if is_running or self._has_worker(client):
                until = time.monotonic() + self._patience_s
            elif time.monotonic() > until:
                gone = f"no worker of pool {self._name} was there for {self._patience_s:g} s (operate.pool_patience_s)"
                queued = f"stage {stage} stays in the queue, and the same command waits for it"
                raise StageFailed(f"{gone}; {self._start_one}; {queued}")
            if stop.wait(POLL_S):
                raise StageFailed(f"stage {stage} stays with pool {self._name}; the same command waits for it")
            run = client.read_flow_run(run.id)
        if not run.state.is_completed():
            may_work = run.state.is_crashed() or run.state.name == UNAVAILABLE
            fault = StageUnavailable if may_work else StageFailed
            state = harmless(f"{run.state.name}, {run.state.message or 'without a word'}")
            raise fault(f"stage {stage} of pool {self._name} is {state} (flow run {run.id})")
        return run

    def _has_worker(self, client: SyncPrefectClient) -> bool:
        """Whether the pool has a worker; if not, a log line every `TELL_S` says how to start one."""
        if any(worker.status == WorkerStatus.ONLINE for worker in client.read_workers_for_work_pool(self._name)):
            return True
        if not self._warned_s or time.monotonic() > self._warned_s + TELL_S:
            self._warned_s = time.monotonic()
            logger.warning("no worker of pool %s is there; %s", self._name, self._start_one)
        return False
