"""The graphs of DVC as Prefect flows: a task per stage, ready stages side by side."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from tempfile import gettempdir
from typing import Any, cast
from uuid import UUID

from httpx import HTTPError
from prefect import Task, flow, task
from prefect import settings as prefect_settings
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import SyncClientContext, TaskRunContext
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectException, TerminationSignal
from prefect.futures import PrefectConcurrentFuture
from prefect.logging.handlers import APILogWorker
from prefect.runtime import deployment, flow_run
from prefect.states import Completed

from agent_r1 import params
from agent_r1.replaced import keep_results_own
from flows import processes
from flows.dvc_files import DVC, collect_graph, dvc_environment
from flows.graph import Pool, StageFailed, StageUnavailable, out_of_date, stages, waiting
from flows.made_of import stage_of
from flows.package import require_current
from flows.stage import ALONE, EXIT_CODE_FILE, PARENT_TASK_RUN, TERMINATED, UNAVAILABLE
from flows.terminal import SideBySide, speak

REPRO = (*DVC, "repro", "--single-item")
CACHED = "Cached"  # the state of a stage that was up to date
# Lines of DVC's after every stage: advice if there is a remote, and what the pipeline's own line says.
UNSAID = (
    "Use `dvc push`",
    "Updating lock file",
    "To track the changes with git",
    "To enable auto staging",
    "\tgit add ",
    "\tdvc ",
)
_LINE = re.compile(r"\d\d:\d\d:\d\d (?P<level>INFO|WARNING|ERROR) (?P<text>.*)")  # as `configure_logging` has it
_COUNTED = re.compile(r"(?P<name>[^:]+): iteration .*; (?P<done>\d+) of (?:at most )?(?P<of>\d+) done.*")
NEWS_S = 5.0  # between two writings of a stage's progress

logger = logging.getLogger(__name__)


def run_command(stage: str, *arguments: str) -> None:
    """Runs `agent-r1 STAGE ARGUMENTS` as a task; StageFailed if it fails, or outlasts `operate.timeouts_s`."""
    command = [sys.executable, "-m", "flows", stage, *arguments]
    _with_retries()(stage, partial(_follow, stage, command, SideBySide()))


def reproduce(stage: str) -> None:
    """Runs one DVC stage as a task; its state is Cached if nothing that it depends on has changed.

    The stage is named by its address from the project's root: `train@ppo`, `ablations/dvc.yaml:train@ppo-0`. Raises
    StageFailed as `run_command` does.
    """
    _with_retries()(stage, partial(_follow, stage, [*REPRO, stage], SideBySide()), ask=True)


def reproduce_all(file: str, pool: str = "") -> None:
    """Brings every stage of a dvc.yaml up to date, with the stages of other files that they depend on.

    Ready stages run side by side, `operate.side_by_side` at a time. A stage for which more others wait comes first.
    Stages for a pool are sent there, all at once. After a failure nothing is begun, and the first StageFailed is raised
    once all running stages have ended. Raises ValueError if there is no such pool.
    """
    operate = params.load().operate
    needs = stages(file)
    with SideBySide(len(needs)) as beside:
        graph = Reproduction(file, needs, Pool(pool, operate.pool_patience_s) if pool else None, beside)
        while graph.goes_on:
            graph.begin(operate.side_by_side)
            graph.take_ended()
    if graph.faults:
        raise graph.faults[0]


class Reproduction:
    """The stages of a graph on their way."""

    def __init__(self, file: str, needs: Mapping[str, set[str]], pool: Pool | None, beside: SideBySide) -> None:
        """`needs` are each stage's direct dependencies."""
        self.faults = list[Any]()
        self._needs = needs
        self._pool = pool
        self._beside = beside
        self._changed = out_of_date("--with-deps", file)
        self._made = set[str]()
        self._sent = {*filter(pool.takes, needs)} if pool else set[str]()
        self._behind = waiting(needs)
        self._order = TopologicalSorter(needs)
        self._ready = list[str]()
        self._running = dict[Future[State[None]], str]()
        self._order.prepare()

    @property
    def goes_on(self) -> bool:
        """Whether there are stages to begin or to wait for."""
        return self._order.is_active() and bool(self._running or not self.faults)

    def begin(self, most: int) -> None:
        """Begins the stages that are ready, so long as at most so many run here."""
        self._ready = sorted([*self._ready, *self._order.get_ready()], key=lambda stage: -len(self._behind[stage]))
        for stage in [] if self.faults else [*self._ready]:
            if stage in self._sent or len({*self._running.values()} - self._sent) < most:
                self._begin(stage)

    def _begin(self, stage: str) -> None:
        alone = not self._running and self._ready == [stage]  # nor does another get ready before it ends
        work: Callable[[], None] = partial(_follow, stage, [*REPRO, stage], self._beside, alone=alone)
        if self._pool and stage in self._sent:
            work = partial(self._pool.make, stage, self._needs[stage], self._beside)
        self._ready.remove(stage)
        stale = stage in self._changed or self._made & self._needs[stage]
        future = _with_retries().submit(stage, work if stale else None, ask=stage not in self._changed)
        self._running[cast("PrefectConcurrentFuture[State[None]]", future).wrapped_future] = stage

    def take_ended(self) -> None:
        """Waits until a stage ends, and takes in what came of it."""
        for future in wait(self._running, return_when=FIRST_COMPLETED).done:
            stage = self._running.pop(future)
            state = future.result()
            if state.is_completed():
                self._order.done(stage)
                count = self._beside.count()
                if state.name != CACHED:
                    self._made.add(stage)
                    logger.info("stage %s is done: %s", stage, count)
                continue
            self.faults.append(state.result(raise_on_failure=False))
            if self._running:  # perhaps for hours, in a pool
                logger.error("%s; what was begun goes on to its end", self.faults[-1])


@contextmanager
def expendable(loss: str) -> Iterator[None]:
    """Lets the flow go on if a stage inside the block fails; a warning names the loss and the cause."""
    try:
        yield
    except StageFailed as fault:
        logger.warning("%s: %s", loss, fault)


def _may_work_later(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.data, StageUnavailable)


def _with_retries() -> Task[..., State[None]]:
    operate = params.load().operate
    return _run.with_options(retries=operate.retries, retry_delay_seconds=operate.retry_delay_s)


@task(name="stage", task_run_name="{stage}", cache_policy=NO_CACHE, retry_condition_fn=_may_work_later)
def _run(stage: str, work: Callable[[], None] | None, *, ask: bool = False) -> State[None]:
    """Does the work of a stage, if it has any; with `ask`, only if DVC says that the stage is out of date."""
    fresh = work is None
    with suppress(ValueError):  # if DVC cannot say, the work tells why
        fresh = fresh or (ask and not out_of_date(stage))
    if work is None or fresh:
        logger.info("stage %s is up to date", stage)
        return Completed(name=CACHED)
    work()
    return Completed()


def _follow(stage: str, command: Sequence[str], beside: SideBySide, *, alone: bool = False) -> None:
    """Runs a command to its end or its time limit, and logs its lines as they come.

    DVC's exit code does not tell how a stage's command ended, so the stage's rim writes its code to a file. `alone`
    says that nothing runs beside the command.
    """
    if deployment.id:  # a worker started this process, and only the worker would end it
        processes.end_with_parent()
    name = stage_of(stage)
    timeout_s = params.load().operate.timeout_s(name)
    environment = _stage_environment(alone=alone)
    with (
        processes.process_group(command, environment) as process,
        beside.line(stage) as show,
        processes.ended_after(process, timeout_s, beside.over) as late,
    ):
        _relay(process.stdout or (), show)
        code = process.wait()
    exit_code = Path(environment[EXIT_CODE_FILE])
    why = "its own lines above say why"
    if exit_code.exists():
        code = int(exit_code.read_text())
        exit_code.unlink()
    else:
        why += ", and `exited with -9` that the system killed it, as it does when memory runs out"
    if late.is_set():
        reason = f"stage {name} took longer than {timeout_s:g} s and was ended; its lines above say what it was at"
        raise StageFailed(f"{reason}; raise operate.timeouts_s.{name} in params.yaml if it needs more")
    if code:
        fault = StageUnavailable if code == UNAVAILABLE else StageFailed
        raise fault(f"stage {stage} failed with exit code {code}; {why}")


def _relay(lines: Iterable[str], show: Callable[[str], None]) -> None:
    """Logs and shows the lines of a stage as they come, and has Prefect show its iterations."""
    progress = IterationsDone()
    for line in filter(str.strip, lines):
        if not line.startswith(UNSAID):
            text = _passed_on(line.rstrip())
            show(text)
            progress.tell(text)


@dataclass
class IterationsDone:
    """Finished iterations of a stage, as an artifact on the page of the flow that started it."""

    written_s: float = 0.0
    artifact: UUID | None = None

    def tell(self, line: str) -> None:
        """Writes the iterations that a line of the stage counts, at most every few seconds and to no dead server."""
        match = _COUNTED.fullmatch(line)
        now_s = time.monotonic()
        if not match or (match["done"] != match["of"] and now_s < self.written_s + NEWS_S):
            return
        share = 100 * int(match["done"]) / int(match["of"])
        about = f"{match['done']} of {match['of']} iterations"
        waits = {prefect_settings.PREFECT_CLIENT_MAX_RETRIES: 0, prefect_settings.PREFECT_API_REQUEST_TIMEOUT: NEWS_S}
        waits[prefect_settings.PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED] = False
        at_once = prefect_settings.temporary_settings(waits)
        # the flow has a client that tries again for minutes; this context brings another one
        with suppress(HTTPError, PrefectException), at_once, SyncClientContext({"timeout": NEWS_S}):
            if self.artifact:
                update_progress_artifact(self.artifact, share, about)
            else:
                artifact = create_progress_artifact(share, artifact_key("progress", match["name"]), about)
                self.artifact = cast("UUID", artifact)
        self.written_s = time.monotonic()


def artifact_key(kind: str, name: str) -> str:
    """The key of an artifact: Prefect takes lower case letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", f"{kind}-{name}".lower())


def _passed_on(line: str) -> str:
    """Logs a stage's line at its own level, and returns its text."""
    match = _LINE.fullmatch(line)
    level = logging.getLevelNamesMapping()[match["level"]] if match else logging.INFO
    text = match["text"] if match else line
    logger.log(level, "%s", text)
    return text


def _stage_environment(*, alone: bool) -> dict[str, str]:
    """This process's environment, and for the stage's own flow its server, its parent and where to leave its code."""
    context = TaskRunContext.get()
    if context is None:
        raise RuntimeError("a stage's command runs as a task, and there is none here")
    password = prefect_settings.PREFECT_API_AUTH_STRING.value()
    return {
        **(ALONE if alone else {}),
        **dvc_environment(),
        "PREFECT_API_URL": prefect_settings.PREFECT_API_URL.value(),
        **({processes.OF_CLIENTS: password} if password else {}),
        PARENT_TASK_RUN: str(context.task_run.id),
        EXIT_CODE_FILE: f"{gettempdir()}/agent_r1_exit_code_{context.task_run.id}",
        processes.PIPELINE: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }


def _run_name() -> str:
    """What a run of a graph is called: `ablations`, `pipeline by gpus`."""
    return " by ".join(filter(None, [flow_run.flow_name, flow_run.parameters["pool"]]))


@flow(name="pipeline", flow_run_name=_run_name)
def pipeline(pool: str = "") -> None:
    """Brings every stage of dvc.yaml up to date; after one that fails no other is begun.

    Args:
        pool: a work pool whose workers make the stages that compute, in clones of their own.
    """
    speak()
    reproduce_all("dvc.yaml", pool)


@flow(name="ablations", flow_run_name=_run_name)
def ablations(pool: str = "") -> None:
    """Brings every stage of the sweep's graph up to date, with all stages that the sweep depends on.

    Args:
        pool: a work pool, used as in `pipeline`.
    """
    speak()
    reproduce_all(collect_graph(Path("ablations")), pool)


def run_pipeline(sweep: str = "", pool: str = "") -> None:
    """Runs the pipeline or a sweep's on the server of PREFECT_API_URL, or on a temporary server.

    No temporary server is started if everything is up to date. Raises OSError if a pool is named and no server answers.
    """
    if pool and not processes.server_answers():
        raise OSError("a pool is on a Prefect server, and none answers; set PREFECT_API_URL to that of its workers")
    require_current()
    keep_results_own()
    file = collect_graph(Path(sweep)) if sweep else "dvc.yaml"
    if not os.environ.get("PREFECT_API_URL") and not out_of_date("--with-deps", file):
        logger.info("everything is up to date")
        return
    with (
        processes.prefect_server() as url,
        prefect_settings.temporary_settings({prefect_settings.PREFECT_API_URL: url}),
    ):
        try:
            (ablations if sweep else pipeline)(pool)
        except StageFailed as fault:
            logger.error("%s", fault)
            sys.exit(1)
        except TerminationSignal:  # Prefect takes SIGTERM over while a flow runs
            sys.exit(TERMINATED)
        finally:
            send_pending_reports()


def send_pending_reports() -> None:
    """Sends reports while the server is still there; later, Prefect would try again for minutes."""
    with suppress(RuntimeError):  # raised where nothing was logged
        APILogWorker.instance().drain()
    EventsWorker.drain_all()
