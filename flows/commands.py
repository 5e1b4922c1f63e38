"""A stage's command as a Prefect task: its lines on the run's page, and nothing left when it ends."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.settings import PREFECT_API_URL

from flows.processes import process_group
from flows.stage import PARENT_TASK_RUN

logger = logging.getLogger(__name__)


class StageFailed(RuntimeError):
    """A stage ended with an error of its own, which it has already explained."""


class StageUnavailable(StageFailed):
    """A stage ended because a file or a server failed it: the same may work later."""


def run_command(stage: str, *arguments: str) -> None:
    """Runs `python -m flows.STAGE ARGUMENTS` as a task.

    Raises:
        StageFailed: its command failed.
    """
    _run([stage, *arguments])


def _may_work_later(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.data, StageUnavailable)


@task(
    name="command",
    task_run_name="{command[0]}",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=30,
    retry_condition_fn=_may_work_later,
)
def _run(command: list[str]) -> None:
    stage, *arguments = command
    context = TaskRunContext.get()
    assert context is not None, "a stage's command runs as a task"
    environment = {
        **os.environ,
        "PREFECT_API_URL": PREFECT_API_URL.value(),
        PARENT_TASK_RUN: str(context.task_run.id),
        "PYTHONUNBUFFERED": "1",
    }
    with process_group([sys.executable, "-m", f"flows.{stage}", *arguments], environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                logger.info("%s", line.rstrip())
        code = process.wait()
    if code:
        fault = StageUnavailable if code == os.EX_TEMPFAIL else StageFailed
        raise fault(f"stage {stage} failed with exit code {code}; its own lines above say why")
