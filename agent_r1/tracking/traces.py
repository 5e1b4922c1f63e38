"""Trajectories as MLflow traces: a span per step and per tool call, rewards as feedback.

Only tools were timed, because the sampler works on many episodes at once. A trace begins when it is logged, and a step
lasts as long as its tool call.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from agent_r1.params import fingerprint
from agent_r1.records import Call, CallStatus, Question, Source, Step, Trajectory
from agent_r1.tracking.store import open_store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Span

IDENTITY_TAG = "trajectory_hash"  # tells the trajectories of two trainings apart that have the same id
PER_PAGE = 500  # traces that MLflow gives at a time
SERVER = "MLFLOW_TRACKING_URI"

Decode = Callable[[Sequence[int]], str]  # token ids -> text, special tokens included


class Traceable(Protocol):
    """A trajectory and what is known about it. K = its steps."""

    @property
    def trajectory(self) -> Trajectory: ...
    @property
    def question(self) -> Question: ...
    @property
    def when(self) -> str: ...  # such as "training"
    @property
    def right(self) -> bool: ...
    @property
    def totals(self) -> NDArray[np.float64]: ...  # [K] the step's reward
    @property
    def parts(self) -> Mapping[str, NDArray[np.float64]]: ...  # name -> [K], unweighted


def log_traces(run_id: str, episodes: Sequence[Traceable], decode: Decode) -> int:
    """Adds a trace of each episode to an MLflow run, besides those that it has; returns how many were added."""
    client, experiment = open_store()
    known = _known(client, experiment, run_id)
    new = {identity: episode for episode in episodes if (identity := _identity(episode)) not in known}
    import mlflow

    named = os.environ.get(SERVER)
    mlflow.set_tracking_uri(client.tracking_uri)  # MLflow's tracing knows only a global store; also sets the variable
    try:
        traces = [_Trace(client, experiment, run_id, identity, new[identity], decode) for identity in new]
        mlflow.flush_trace_async_logging()
        for trace in traces:
            trace.assess()
    finally:
        if named is None:
            os.environ.pop(SERVER, None)
        else:
            os.environ[SERVER] = named
    return len(traces)


def _known(client: MlflowClient, experiment: str, run_id: str) -> set[str]:
    """The identities of a run's traces."""
    found: set[str] = set()
    token: str | None = ""
    while token is not None:
        page = client.search_traces(
            locations=[experiment], run_id=run_id, include_spans=False, max_results=PER_PAGE, page_token=token or None
        )
        found |= {trace.info.tags.get(IDENTITY_TAG, "") for trace in page}
        token = page.token or None
    return found


def _identity(episode: Traceable) -> str:
    trajectory = episode.trajectory
    return fingerprint(episode.when, trajectory.trajectory_id, trajectory.token_ids.tolist())


class _Trace:
    """The trace of one episode, logged when it is made."""

    def __init__(
        self, client: MlflowClient, experiment: str, run_id: str, identity: str, episode: Traceable, decode: Decode
    ) -> None:
        self._client, self._episode, self._decode = client, episode, decode
        self._now_ns = time.time_ns()
        trajectory = episode.trajectory
        self._root = client.start_trace(
            "episode",
            span_type="AGENT",
            inputs={"question": episode.question.text},
            tags={
                **episode.question.strata,
                "trajectory_id": trajectory.trajectory_id,
                "question_id": episode.question.question_id,
                "iteration": str(trajectory.iteration),
                "policy_version": str(trajectory.policy_version),
                "when": str(episode.when),
                "outcome": str(trajectory.outcome),
                IDENTITY_TAG: identity,
            },
            experiment_id=experiment,
            start_time_ns=self._now_ns,
            run_id=run_id,
        )
        read = 0
        for number, step in enumerate(trajectory.steps):
            self._log_step(number, step, self._text(slice(read, step.action_start)))
            read = step.action_stop
        client.end_trace(
            self._root.trace_id,
            outputs={"answer": trajectory.answer, "outcome": trajectory.outcome},
            status="ERROR" if trajectory.aborted else "OK",
            end_time_ns=self._now_ns,
        )

    def assess(self) -> None:
        """Adds the expected answer and the episode's rewards: the weighted sum, and every part unweighted."""
        import mlflow
        from mlflow.entities import AssessmentSource

        source, trace_id = AssessmentSource(source_type="CODE", source_id="agent_r1"), self._root.trace_id
        episode = self._episode
        mlflow.log_expectation(trace_id=trace_id, name="gold answers", value=episode.question.answers, source=source)
        parts = {name: float(part.sum()) for name, part in episode.parts.items()}
        for name, value in {"return": float(episode.totals.sum()), "right": episode.right, **parts}.items():
            mlflow.log_feedback(trace_id=trace_id, name=name, value=value, source=source)

    def _log_step(self, number: int, step: Step, read: str) -> None:
        """A span of what the policy read and said, with its tool call's inside."""
        episode, begins_ns = self._episode, self._now_ns
        span = self._client.start_span(
            f"step {number + 1}",
            self._root.trace_id,
            self._root.span_id,
            span_type="LLM",
            inputs={"read": read},
            attributes={
                "tokens_sampled": step.action_stop - step.action_start,
                "stop_reason": step.stop_reason,
                "reward": float(episode.totals[number]),
                "rewards": {name: float(part[number]) for name, part in episode.parts.items() if part[number]},
            },
            start_time_ns=begins_ns,
        )
        self._now_ns += round(1e9 * max((call.latency_s for call in step.calls), default=0.0))
        for call in step.calls:
            self._log_call(number, call, span, begins_ns)
        said = {"action": self._text(slice(step.action_start, step.action_stop))}
        self._client.end_span(span.trace_id, span.span_id, said, end_time_ns=self._now_ns)

    def _log_call(self, number: int, call: Call, parent: Span, begins_ns: int) -> None:
        span = self._client.start_span(
            call.tool or "tool call",
            parent.trace_id,
            parent.span_id,
            span_type="TOOL",
            inputs=json.loads(call.arguments) if call.arguments else {},
            attributes={"call_status": call.status, "latency_s": call.latency_s},
            start_time_ns=begins_ns,
        )
        steps = self._episode.trajectory.steps
        until = steps[number + 1].action_start if number + 1 < len(steps) else None
        gave = {"observation": self._text(slice(steps[number].action_stop, until), Source.OBSERVATION)}
        status, ends_ns = "OK" if call.status is CallStatus.OK else "ERROR", begins_ns + round(1e9 * call.latency_s)
        self._client.end_span(span.trace_id, span.span_id, gave, status=status, end_time_ns=ends_ns)

    def _text(self, span: slice, source: Source | None = None) -> str:
        """The tokens of a span, or those of one source in it, as text."""
        trajectory = self._episode.trajectory
        ids = trajectory.token_ids[span]
        return self._decode((ids if source is None else ids[np.equal(trajectory.source[span], source)]).tolist())
