"""The graphs of DVC as Prefect flows: one task per stage, in the order that DVC gives."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from contextlib import suppress
from graphlib import TopologicalSorter

from prefect import flow
from prefect.events.worker import EventsWorker
from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.commands import DVC, StageFailed, reproduce
from flows.server import prefect_server
from flows.stage import TERMINATED, clean_end

logger = logging.getLogger(__name__)


@flow(name="pipeline")
def pipeline() -> None:
    """Brings every stage of dvc.yaml up to date; the first one that fails ends the flow.

    Raises:
        StageFailed: a stage's command failed.
        ValueError: dvc.yaml or params.yaml is refused by DVC.
    """
    for stage in stages("dvc.yaml"):
        reproduce(stage)


@flow(name="ablations")
def ablations() -> None:
    """The same of ablations/dvc.yaml, and of all that it is made of."""
    for stage in stages("ablations/dvc.yaml"):
        reproduce(stage)


def stages(file: str) -> list[str]:
    """The stages of a dvc.yaml and those of others that they depend on, each after its own dependencies.

    Raises:
        ValueError: DVC refuses the project's files.
    """
    result = subprocess.run([*DVC, "dag", "--dot", file], capture_output=True, text=True, check=False)
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


if __name__ == "__main__":
    main()
