"""How the tools of a stage were used: what the policy called, what became of it, and how long that took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from agent_r1.records import Call, CallStatus, Trajectory


class UnderWay:
    """Measures the time in which at least one call is under way."""

    def __init__(self) -> None:
        self._calls, self._since = 0, 0.0
        self.seconds = 0.0  # up to the last moment without a call

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call is under way within; others may be at the same time."""
        if not self._calls:
            self._since = time.perf_counter()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self.seconds += time.perf_counter() - self._since


def use_of_tools(trajectories: Sequence[Trajectory], tools: Sequence[str]) -> dict[str, float]:
    """For each tool `tool/<name>/calls`, per episode, and of its calls `ok_share` and `timeout_share`.

    Episodes that the world cut short do not count. A tool without calls has no shares, and what the policy called that
    is none of the tools is left out.
    """
    lived, found = _calls(trajectories)
    metrics = {}
    for name in tools:
        statuses = [call.status for call in found if call.tool == name]
        metrics[f"tool/{name}/calls"] = len(statuses) / max(lived, 1)
        if statuses:
            metrics[f"tool/{name}/ok_share"] = statuses.count(CallStatus.OK) / len(statuses)
            metrics[f"tool/{name}/timeout_share"] = statuses.count(CallStatus.TIMEOUT) / len(statuses)
    return metrics


def latencies(trajectories: Sequence[Trajectory], tools: Sequence[str]) -> dict[str, float]:
    """For each tool that was called the median and the 95th percentile of its calls' seconds.

    They are `tool/<name>/latency_p50_s` and `latency_p95_s`, over the calls of `use_of_tools`. Nothing of this is among
    the reproducible bits.
    """
    _, found = _calls(trajectories)
    metrics = {}
    for name in tools:
        if seconds := [call.latency_s for call in found if call.tool == name]:
            for percent in (50, 95):
                metrics[f"tool/{name}/latency_p{percent}_s"] = float(np.percentile(seconds, percent))
    return metrics


def _calls(trajectories: Sequence[Trajectory]) -> tuple[int, list[Call]]:
    """How many episodes the world did not cut short, and all calls of those."""
    lived = [each for each in trajectories if not each.aborted]
    return len(lived), [call for each in lived for step in each.steps for call in step.calls]
