"""The pipeline as a Prefect flow: one task per DVC stage, in the order that dvc.yaml gives."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from graphlib import TopologicalSorter

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.events.worker import EventsWorker
from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed

from flows.processes import process_group
from flows.server import prefect_server
from flows.stage import PARENT_TASK_RUN, TERMINATED, clean_end

DVC = [sys.executable, "-m", "dvc"]
UP_TO_DATE = re.compile(r"Stage '.+' (didn't change, skipping|is cached - skipping run)")

logger = logging.getLogger(__name__)


class StageFailed(RuntimeError):
    """A stage ended with an error of its own, which it has already explained."""


@flow(name="pipeline")
def pipeline() -> None:
    """Brings every stage up to date; the first one that fails ends the flow.

    Raises:
        StageFailed: a stage's command failed.
        ValueError: dvc.yaml or params.yaml is refused by DVC.
    """
    for stage in stages():
        reproduce(stage)


@task(name="reproduce", task_run_name="{stage}", cache_policy=NO_CACHE)
def reproduce(stage: str) -> State[None]:
    """Runs one DVC stage if anything it depends on has changed; its state is Cached where nothing has."""
    cached = False
    with process_group([*DVC, "repro", "--single-item", stage], _stage_environment()) as process:
        for line in _lines(process):
            logger.info("%s", line)
            cached = cached or UP_TO_DATE.match(line) is not None
        code = process.wait()
    if code:
        raise StageFailed(f"stage {stage} failed with exit code {code}; its own lines above say why")
    return Completed(name="Cached") if cached else Completed()


def stages() -> list[str]:
    """The names of dvc.yaml's stages, each after those it depends on.

    Raises:
        ValueError: DVC refuses the project's files.
    """
    result = subprocess.run([*DVC, "dag", "--dot", "dvc.yaml"], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"dvc dag failed: {result.stderr.strip()}")
    return ordered(result.stdout)


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


def main() -> None:
    with clean_end(), prefect_server() as url, temporary_settings({PREFECT_API_URL: url}):
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


def _stage_environment() -> dict[str, str]:
    """This process's environment, and where the stage's own flow finds its server and its parent."""
    context = TaskRunContext.get()
    assert context is not None, "reproduce runs as a task"
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


if __name__ == "__main__":
    main()
