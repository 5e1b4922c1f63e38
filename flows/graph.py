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
    found: dict[str, set[str]] = {}
    for line in dot.splitlines():
        nodes = re.findall(r'"([^"]+)"', line)  # a node, or two of an edge
        for node in nodes:
            found.setdefault(node, set()).update(nodes[:-1] if node == nodes[-1] else ())
    return found


def waiting(needs: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """For every stage, all stages that have to wait for its end."""
    behind: dict[str, set[str]] = {stage: set() for stage in needs}
    for stage in reversed([*TopologicalSorter(needs).static_order()]):
        for before in needs[stage]:
            behind[before] |= {stage, *behind[stage]}
    return behind


def out_of_date(*targets: str) -> set[str]:
    """The stages that DVC would run. Raises ValueError if params.yaml or the graph is not valid."""
    return {*json.loads(_answer("status", "--json", *targets))}


def _answer(*arguments: str) -> str:
    params.load()  # checks the names that DVC puts into commands
    done = ask_dvc(*arguments)
    if done.returncode:
        raise ValueError(f"dvc {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


class Described(NamedTuple):
    """A clone's state of a stage."""

    made_of: dict[str, str]  # its command, parameters and the hashes of its dependencies that are there now, by name
    outs: dict[str, str]  # path -> DVC's hash in dvc.lock; "" if the stage is not in it


def described(*stages: str) -> dict[str, Described]:
    """This clone's state of stages. Raises ValueError if its graph cannot be read, or lacks one of them."""
    done = in_dvc("describe", *stages)
    if failed := complaint(done):
        raise ValueError(f"DVC cannot tell of {', '.join(stages)}: {failed}")
    return {stage: Described(*each) for stage, each in json.loads(done.stdout).items()}


def require_alike(stage: str, theirs: Mapping[str, str], ours: Mapping[str, str], but: Iterable[str] = ()) -> None:
    """Raises ValueError with the differences if a stage is made of something else in another clone.

    Dependencies that are, contain, or lie in one of the paths `but` are left out.
    """
    paths = [*but]
    names = [name for name in differing(theirs, ours) if not any(_meet(name, path) for path in paths)]
    if names:
        there, here = ({name: each[name] for name in names if name in each} for each in (theirs, ours))
        said, remedy = some(differences(there, here)), "bring both clones to the same commit and the same params.yaml"
        raise ValueError(f"{stage} is made of something else there than here: {harmless(said)}; {remedy}")


def bring(known: Mapping[str, Described], hashes: Mapping[str, object]) -> None:
    """Puts the outputs of stages into their places, from DVC's cache or its remote; dvc.lock stays as it is.

    Args:
        known: the stages, as `described` has them.
        hashes: path -> DVC's hash, as another clone says; nothing but this clone's own outputs is looked up in it.

    Raises ValueError if an output has no valid hash, or the listing of a folder is not valid. Raises OSError if the
    remote lacks an output or has another one, or if DVC cannot put it into its place.
    """
    wanted = {path: hashes.get(path) for each in known.values() for path in each.outs}
    for path, md5 in wanted.items():
        if not isinstance(md5, str) or not _MD5.fullmatch(md5):
            said, remedy = harmless(f"{md5!r:.80}"), "delete its flow run in Prefect to have it made again"
            raise ValueError(f"{path} comes with no hash of DVC's but {said}; {remedy}")
    listings = [md5 for md5 in map(str, wanted.values()) if md5.endswith(".dir")]
    failed = next(filter(None, map(require_listing, listings)), "")
    if failed := failed or complaint(in_dvc("bring", *known, given=json.dumps(wanted))):
        raise OSError(f"{', '.join(wanted)} could not be brought here from DVC's remote ({failed})")


def _meet(one: str, other: str) -> bool:
    """Whether two paths are equal, or one is inside the other."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


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
        self._name, self._patience_s, self._told = name, patience_s, 0.0
        self._start_one = f"start one in a clone of this commit: `agent-r1 worker --pool {name}`"
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
        return stage_of(stage) in SENT

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
            key, above = f"{self._name}-{content}-{attempt}", UUID(task_run.id) if task_run.id else None
            run = client.create_flow_run_from_deployment(
                self._deployment, parameters=asked, name=stage, idempotency_key=key, parent_task_run_id=above
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
                gone = f"no worker of pool {self._name} was there for {self._patience_s:g} s (operate.pool_patience_s)"
                queued = f"stage {stage} stays in the queue, and the same command waits for it"
                raise StageFailed(f"{gone}; {self._start_one}; {queued}")
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
