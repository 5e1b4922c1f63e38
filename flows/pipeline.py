"""The graphs of DVC as Prefect flows: one task per stage's command, in the order that DVC gives."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from graphlib import TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefect import Task, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.events.worker import EventsWorker
from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogWorker
from prefect.runtime import deployment
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed

from agent_r1 import params
from flows.dvc_files import DVC, ask_dvc, collect_graph
from flows.processes import end_with_parent, prefect_server, process_group
from flows.stage import EXIT_CODE_FILE, PARENT_TASK_RUN, TERMINATED, UNAVAILABLE, speak

_LINE = re.compile(r"\d\d:\d\d:\d\d (?P<level>INFO|WARNING|ERROR) (?P<said>.*)")  # as `configure_logging` has it

logger = logging.getLogger(__name__)


class StageFailed(RuntimeError):
    """A stage ended with an error of its own, which it has already explained."""


class StageUnavailable(StageFailed):
    """A stage ended because a file or a server failed it: the same may work later."""


def run_command(stage: str, *arguments: str) -> None:
    """Runs `agent-r1 STAGE ARGUMENTS` as a task.

    Raises StageFailed if its command failed, or took longer than `operate.timeouts_s`.
    """
    _limited(stage, stage, [sys.executable, "-m", "flows", stage, *arguments], by_dvc=False)


def reproduce(stage: str) -> None:
    """Runs one DVC stage as a task if anything it depends on has changed; its state is Cached where nothing has.

    The stage is named as DVC addresses it from the project's root: `train@ppo`, `ablations/dvc.yaml:train@ppo-0`.
    """
    name = stage.rpartition(":")[2].partition("@")[0]
    _limited(name, stage, [*DVC, "repro", "--single-item", stage], by_dvc=True)


@contextmanager
def expendable(loss: str) -> Iterator[None]:
    """Lets the flow go on where a stage inside the block fails: a warning says what is lost, and why."""
    try:
        yield
    except StageFailed as fault:
        logger.warning("%s: %s", loss, fault)


def _limited(name: str, stage: str, command: list[str], *, by_dvc: bool) -> None:
    """Runs a stage's command as a task with the time limit and the retries of params.yaml."""
    operate = params.load().operate
    timeout_s = operate.timeout_s(name)
    limited = _run.with_options(
        timeout_seconds=timeout_s, retries=operate.retries, retry_delay_seconds=operate.retry_delay_s
    )
    try:
        limited(stage, command, by_dvc=by_dvc)
    except TimeoutError:
        raise StageFailed(
            f"stage {name} took longer than {timeout_s:g} s and was ended; its lines above say what it was at; "
            f"raise operate.timeouts_s.{name} in params.yaml if it needs more"
        ) from None


def _may_work_later(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.data, StageUnavailable)


@task(name="stage", task_run_name="{stage}", cache_policy=NO_CACHE, retry_condition_fn=_may_work_later)
def _run(stage: str, command: list[str], *, by_dvc: bool) -> State[None]:
    if by_dvc:
        found = ask_dvc("status", "--json", stage)
        if not found.returncode and not json.loads(found.stdout):
            logger.info("stage %s is up to date", stage)
            return Completed(name="Cached")
    _follow(stage, command)
    return Completed()


def _follow(stage: str, command: Sequence[str]) -> None:
    """Runs a command to its end, its lines logged as they come.

    DVC's own exit code does not tell how a stage's command ended, so the stage's rim writes that to a file.
    """
    if deployment.id:  # a worker started this process; without it nobody would end it, or see it end
        end_with_parent()
    with TemporaryDirectory() as folder:
        exit_code = Path(folder) / "exit_code"
        with process_group(command, _stage_environment(exit_code)) as process:
            for line in filter(str.strip, process.stdout or ()):
                _pass_on(line.rstrip())
            code = process.wait()
        if code and exit_code.exists():
            code = int(exit_code.read_text())
    if code:
        fault = StageUnavailable if code == UNAVAILABLE else StageFailed
        raise fault(f"stage {stage} failed with exit code {code}; its own lines above say why")


def _pass_on(line: str) -> None:
    """Logs a stage's line at the level that it has, with a time of this process."""
    found = _LINE.fullmatch(line)
    level = logging.getLevelNamesMapping()[found["level"]] if found else logging.INFO
    logger.log(level, "%s", found["said"] if found else line)


def _stage_environment(exit_code: Path) -> dict[str, str]:
    """This process's environment, and where the stage's own flow finds its server and its parent."""
    context = TaskRunContext.get()
    if context is None:
        raise RuntimeError("a stage's command runs as a task, and there is none here")
    return {
        **os.environ,
        "PREFECT_API_URL": PREFECT_API_URL.value(),
        PARENT_TASK_RUN: str(context.task_run.id),
        EXIT_CODE_FILE: str(exit_code),
        "PYTHONUNBUFFERED": "1",
    }


@flow(name="pipeline")
def pipeline() -> None:
    """Brings every stage of dvc.yaml up to date; the first one that fails ends the flow."""
    speak()
    for stage in stages("dvc.yaml"):
        reproduce(stage)


@flow(name="ablations")
def ablations() -> None:
    """Brings every stage of the sweep's graph up to date, and all that the sweep is made of, as `pipeline` does."""
    speak()
    for stage in stages(collect_graph(Path("ablations"))):
        reproduce(stage)


def stages(file: str) -> list[str]:
    """The stages of a dvc.yaml and those of others that they depend on, each after its own dependencies.

    Raises ValueError if params.yaml, whose names DVC puts into commands, or the graph is not valid.
    """
    params.load()
    drawn = ask_dvc("dag", "--dot", file)
    if drawn.returncode:
        raise ValueError(f"dvc dag failed: {drawn.stderr.strip()}")
    return ordered(drawn.stdout)


def ordered(dot: str) -> list[str]:
    """The nodes of a graph in the DOT language, each after its predecessors."""
    graph: TopologicalSorter[str] = TopologicalSorter()
    for line in dot.splitlines():
        match re.findall(r'"([^"]+)"', line):
            case [node]:
                graph.add(node)
            case [before, after]:
                graph.add(after, before)
    return list(graph.static_order())


def run_pipeline() -> None:
    """Runs the pipeline on the server of PREFECT_API_URL, or on one that ends with it."""
    with prefect_server() as url, temporary_settings({PREFECT_API_URL: url}):
        try:
            pipeline()
        except StageFailed as fault:
            logger.error("%s", fault)
            sys.exit(1)
        except TerminationSignal:  # Prefect takes SIGTERM over while a flow runs
            sys.exit(TERMINATED)
        finally:
            _send_pending_reports()


def _send_pending_reports() -> None:
    """While the server is still there: Prefect would try again for minutes after it has gone."""
    with suppress(RuntimeError):  # raised where nothing was logged
        APILogWorker.instance().drain()
    EventsWorker.drain_all()
