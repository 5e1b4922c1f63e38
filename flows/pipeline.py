"""The graphs of DVC as Prefect flows: one task per stage, in the order that DVC gives."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import suppress
from graphlib import TopologicalSorter

from prefect import flow
from prefect.events.worker import EventsWorker
from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.commands import StageFailed, reproduce
from flows.dvc_files import ask_dvc
from flows.server import prefect_server
from flows.stage import TERMINATED

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
    """Brings every stage of ablations/dvc.yaml up to date, and all that the sweep is made of, as `pipeline` does."""
    for stage in stages("ablations/dvc.yaml"):
        reproduce(stage)


def stages(file: str) -> list[str]:
    """The stages of a dvc.yaml and those of others that they depend on, each after its own dependencies.

    Raises:
        ValueError: DVC refuses the project's files.
    """
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


def main() -> None:
    """The command line: the pipeline on the server of PREFECT_API_URL, or on one that ends with it."""
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
