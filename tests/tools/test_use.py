from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest

from agent_r1.records import Call, CallStatus, Outcome, Step, StopReason, Trajectory
from agent_r1.tools.toolbox import UnderWay, latencies, use_of_tools


def episode(actions: Sequence[Sequence[Call]], outcome: Outcome = Outcome.ANSWERED) -> Trajectory:
    """One whose actions, of a token each, made the given calls."""
    length = len(actions)
    return Trajectory(
        trajectory_id="0/q/0",
        question_id="q",
        group=0,
        sample=0,
        seed=0,
        policy_version=0,
        iteration=0,
        token_ids=np.zeros(length, np.int32),
        source=np.ones(length, np.uint8),
        logprobs=np.zeros(length, np.float32),
        context_starts=[0],
        steps=[
            Step(action_start=at, action_stop=at + 1, stop_reason=StopReason.END, calls=list(calls), rewards={})
            for at, calls in enumerate(actions)
        ],
        outcome=outcome,
        answer="",
    )


def call(tool: str, latency_s: float = 0.0, status: CallStatus = CallStatus.OK) -> Call:
    return Call(tool=tool, arguments="{}", status=status, latency_s=latency_s)


EPISODES = [
    episode([[call("search", 0.1), call("search", 0.3, CallStatus.TIMEOUT)], [call("search", 0.2)], []]),
    episode([[call("search", 1.0, CallStatus.FAILED)], [call("oracle", 0.0, CallStatus.UNKNOWN_TOOL)]]),
    episode([[Call(status=CallStatus.MALFORMED)]], Outcome.MALFORMED),
    episode([[call("search", 60.0, CallStatus.TIMEOUT)]], Outcome.ABORTED),
]


def test_tools_that_are_offered_are_counted_per_episode_and_by_what_became_of_their_calls() -> None:
    """Three episodes lived. Four calls of search: two succeed, one runs out of time, one fails."""
    assert use_of_tools(EPISODES, ["search", "calculator"]) == {
        "tool/search/calls": 4 / 3,
        "tool/search/ok_share": 2 / 4,
        "tool/search/timeout_share": 1 / 4,
        "tool/calculator/calls": 0.0,
    }
    assert use_of_tools(EPISODES[3:], ["search"]) == {"tool/search/calls": 0.0}


def test_latencies_are_percentiles_of_the_calls_of_episodes_that_lived() -> None:
    """.1, .2, .3 and 1 s: the median is .25, and the 95th percentile .85 of the way from .3 to 1."""
    assert latencies(EPISODES, ["search", "calculator"]) == pytest.approx(
        {"tool/search/latency_p50_s": 0.25, "tool/search/latency_p95_s": 0.895}
    )


def test_calls_that_are_under_way_together_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls from second 1 to 4, 2 to 6 and 8 to 9: 5 s and 1 s."""
    clock = iter([1.0, 6.0, 8.0, 9.0])
    monkeypatch.setattr("agent_r1.tools.toolbox.time.perf_counter", lambda: next(clock))
    waiting = UnderWay()
    with ExitStack() as first:
        first.enter_context(waiting.call())
        with waiting.call():
            first.close()
    with pytest.raises(RuntimeError), waiting.call():
        raise RuntimeError("a bug of the tool")
    assert waiting.seconds == 6.0
