"""DVC's view of a graph: its stages, their order, and which of them are out of date."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from graphlib import TopologicalSorter

from agent_r1 import params
from flows.dvc_files import ask_dvc


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
        match re.findall(r'"([^"]+)"', line):
            case [node]:
                found.setdefault(node, set())
            case [before, after]:
                found.setdefault(before, set())
                found.setdefault(after, set()).add(before)
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
