"""A stage's command as a Prefect task: its lines on the run's page, a time limit, and nothing left when it ends."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.runtime import deployment
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed

from agent_r1 import params
from flows.processes import end_with_parent, process_group
from flows.stage import PARENT_TASK_RUN, UNAVAILABLE

R = TypeVar("R")

DVC = [sys.executable, "-m", "dvc"]
UP_TO_DATE = re.compile(r"Stage '.+' (didn't change, skipping|is cached - skipping run)")
DVC_UNAVAILABLE = re.compile(rf"exited with {UNAVAILABLE}$|Unable to acquire lock")

logger = logging.getLogger(__name__)


class StageFailed(RuntimeError):
    """A stage ended with an error of its own, which it has already explained."""


class StageUnavailable(StageFailed):
    """A stage ended because a file or a server failed it: the same may work later."""


def run_command(stage: str, *arguments: str) -> None:
    """Runs `python -m flows.STAGE ARGUMENTS` as a task.

    Raises:
        StageFailed: its command failed, or took longer than `operate.timeouts_s`.
    """
    _limited(_run, stage, [stage, *arguments])


def reproduce(stage: str) -> None:
    """Runs one DVC stage as a task if anything it depends on has changed; its state is Cached where nothing has.

    Args:
        stage: as DVC addresses it from the project's root: `train@ppo`, `ablations/dvc.yaml:train@ppo-0`.

    Raises:
        StageFailed: its command failed, or took longer than `operate.timeouts_s`.
    """
    _limited(_reproduce, stage.rpartition(":")[2].partition("@")[0], stage)


@contextmanager
def expendable(loss: str) -> Iterator[None]:
    """Lets the flow go on where a stage inside the block fails: a warning says what is lost, and why."""
    try:
        yield
    except StageFailed as fault:
        logger.warning("%s: %s", loss, fault)


def _limited(stage_task: Task[[R], State[None]], name: str, argument: R) -> None:
    """Calls a task with the stage's time limit and the retries of params.yaml."""
    operate = params.load().operate
    timeout_s = operate.timeout_s(name)
    limited = stage_task.with_options(
        timeout_seconds=timeout_s, retries=operate.retries, retry_delay_seconds=operate.retry_delay_s
    )
    try:
        limited(argument)
    except TimeoutError:
        raise StageFailed(
            f"stage {name} took longer than {timeout_s:g} s and was ended; its lines above say what it was at; "
            f"raise operate.timeouts_s.{name} in params.yaml if it needs more"
        ) from None


def _may_work_later(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.data, StageUnavailable)


@task(name="command", task_run_name="{command[0]}", cache_policy=NO_CACHE, retry_condition_fn=_may_work_later)
def _run(command: list[str]) -> State[None]:
    stage, *arguments = command
    code, _ = _follow([sys.executable, "-m", "flows", stage, *arguments])
    _require_success(stage, code, unavailable=code == UNAVAILABLE)
    return Completed()


@task(name="reproduce", task_run_name="{stage}", cache_policy=NO_CACHE, retry_condition_fn=_may_work_later)
def _reproduce(stage: str) -> State[None]:
    code, lines = _follow([*DVC, "repro", "--single-item", stage])
    _require_success(stage, code, unavailable=any(DVC_UNAVAILABLE.search(line) for line in lines))
    cached = any(UP_TO_DATE.match(line) for line in lines)
    return Completed(name="Cached") if cached else Completed()


def _follow(command: Sequence[str]) -> tuple[int, list[str]]:
    """Runs a command to its end, its lines logged as they come; its exit code and its lines."""
    lines = []
    if deployment.id:  # a worker started this process; without it nobody would end it, or see it end
        end_with_parent()
    with process_group(command, _stage_environment()) as process:
        for line in _lines(process):
            logger.info("%s", line)
            lines.append(line)
        return process.wait(), lines


def _require_success(stage: str, code: int, *, unavailable: bool) -> None:
    if code:
        fault = StageUnavailable if unavailable else StageFailed
        raise fault(f"stage {stage} failed with exit code {code}; its own lines above say why")


def _stage_environment() -> dict[str, str]:
    """This process's environment, and where the stage's own flow finds its server and its parent."""
    context = TaskRunContext.get()
    assert context is not None, "a stage's command runs as a task"
    return {
        **os.environ,
        "PREFECT_API_URL": PREFECT_API_URL.value(),
        PARENT_TASK_RUN: str(context.task_run.id),
        "PYTHONUNBUFFERED": "1",
    }


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip():
            yield line.rstrip()
