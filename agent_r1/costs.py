"""The costs of a training so far, by purpose, as metrics: cost/sampling_core_s, cost/sampling_device_s, ...

Core-seconds are of the process, of all that it started, and of the other ranks of this machine. Device-seconds are
seconds times the GPUs that it holds; a machine without any is one device.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum

import numpy as np
import psutil
from numpy.typing import NDArray


class Purpose(StrEnum):
    """What a process's time is spent on."""

    SAMPLING = "sampling"
    TOOLS = "tools"
    LEARNING = "learning"
    PROOF = "proof"
    WRITING = "writing"
    OTHER = "other"
    EVALUATION = "evaluation"
    WAITING = "waiting"


class Costs:
    """Charges a process's time to one purpose after the other."""

    def __init__(self) -> None:
        self.spent = defaultdict[str, float](float)  # metrics, of earlier processes too
        self.devices = 1  # GPUs
        self.engine = set[int]()  # the ids of the engine's processes, which always sample
        self._root = psutil.Process()
        self._charged = self._look()

    def charge(self, purpose: Purpose, waited_s: float = 0.0) -> None:
        """Charges all since the last charge; in `waited_s` of it a tool's call was under way.

        While the process samples, all that it started beside the engine is tools. The engine may sample at any time.
        """
        start = self._charged
        self._charged = self._look()
        seconds, process, engine, children = self._charged - start
        children += min(engine, 0.0)  # an engine that has ended is among them
        beside = Purpose.TOOLS if purpose is Purpose.SAMPLING else purpose
        engines = Purpose.OTHER if purpose is Purpose.OTHER else Purpose.SAMPLING  # the former are its start and end
        self.spent[f"cost/{purpose}_device_s"] += self.devices * (seconds - waited_s)
        self.spent[f"cost/{beside}_device_s"] += self.devices * waited_s
        self.spent[f"cost/{purpose}_core_s"] += process
        self.spent[f"cost/{beside}_core_s"] += children
        self.spent[f"cost/{engines}_core_s"] += max(engine, 0.0)

    def of_ranks(self) -> None:
        """Counts the other ranks of this machine too: all that torchrun, which started this one, has started."""
        self._root = psutil.Process(os.getppid())

    def _look(self) -> NDArray[np.float64]:
        """The clock, and the core-seconds of this process, of the engine's, and of all others that it started."""
        this = psutil.Process()
        resident = 0
        totals = np.array([time.perf_counter(), time.process_time(), 0.0, sum(this.cpu_times()[2:4])])
        for process in {this, *self._root.children(recursive=True)}:
            with suppress(psutil.NoSuchProcess):
                resident += process.memory_info().rss
                if process != this:
                    totals[2 if {process.pid, process.ppid()} & self.engine else 3] += sum(process.cpu_times()[:4])
        self.spent["cost/peak_gib"] = max(self.spent["cost/peak_gib"], resident / 2**30)
        return totals


def costs_in(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The latest costs in rows of metrics, which are the highest, since they only grow."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("cost/"))
    return {name: max(row.get(name, 0.0) for row in rows) for name in names}
