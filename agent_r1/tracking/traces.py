"""Trajectories as MLflow traces: a span per step and per tool call, rewards as feedback.

A trace's state says whether the answer was right, and its session is the question, which joins the samples of it. It
lasts as long as the episode took, which waits for others that are sampled with it, and ends when it is logged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from agent_r1.params import fingerprint
from agent_r1.records import Call, CallStatus, Decode, Floats, Question, Source, Step, Trajectory
from agent_r1.tracking.store import allowed, open_store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Span

IDENTITY_TAG = "trajectory_hash"  # tells the trajectories of two trainings apart that have the same id


@dataclass(frozen=True, slots=True)
class Rewarded:
    """A finished episode, with its rewards if it was trained on. K = its steps."""

    when: str  # such as "training"
    question: Question
    trajectory: Trajectory
    totals: Floats = field(default_factory=lambda: np.zeros(0))  # [K] the step's reward, weighted; or [0]
    parts: Mapping[str, Floats] = field(default_factory=dict)  # name -> [K], unweighted


def log_traces(run_id: str, episodes: Sequence[Rewarded], decode: Decode) -> int:
    """Adds the traces that an MLflow run lacks, and returns how many; `decode` keeps special tokens."""
    client, experiment = open_store()
    import mlflow

    traces = dict[str, Rewarded]()
    with allowed("traces", client):
        stored = mlflow.search_traces(locations=[experiment], run_id=run_id, include_spans=False, return_type="list")
        identities = {trace.info.tags.get(IDENTITY_TAG) for trace in stored}
        for episode in episodes:
            row = episode.trajectory
            identity = fingerprint(episode.when, row.trajectory_id, row.token_ids.tolist())
            if identity not in identities:
                identities.add(identity)
                traces[_Trace(client, episode, decode).log(experiment, run_id, identity)] = episode
        mlflow.flush_trace_async_logging()
        for trace_id, episode in traces.items():
            _assess(trace_id, episode)
    return len(traces)


def _assess(trace_id: str, episode: Rewarded) -> None:
    """Adds the expected answer, whether it was given, and the rewards: the weighted sum, and every part unweighted."""
    import mlflow
    from mlflow.entities import AssessmentSource

    source = AssessmentSource(source_type="CODE", source_id="agent_r1")
    mlflow.log_expectation(trace_id=trace_id, name="gold answers", value=episode.question.answers, source=source)
    row = episode.trajectory
    feedback: dict[str, bool | float] = {} if row.aborted else {"right": bool(row.success)}
    if episode.totals.size:
        feedback["return"] = float(episode.totals.sum())
    feedback |= {name: float(part.sum()) for name, part in episode.parts.items()}
    for name, value in feedback.items():
        mlflow.log_feedback(trace_id=trace_id, name=name, value=value, source=source)


class _Trace:
    def __init__(self, client: MlflowClient, episode: Rewarded, decode: Decode) -> None:
        self._client = client
        self._episode = episode
        self._trajectory = episode.trajectory
        self._decode = decode
        self._now_ns = time.time_ns() - sum(map(_duration_ns, episode.trajectory.steps))

    def log(self, experiment: str, run_id: str, identity: str) -> str:
        """Logs the episode and its steps; returns the trace's id."""
        from mlflow.tracing.constant import TraceMetadataKey
        from mlflow.tracing.trace_manager import InMemoryTraceManager

        trajectory = self._trajectory
        question = self._episode.question
        root = self._client.start_trace(
            "episode",
            span_type="AGENT",
            inputs={"question": question.text},
            tags={
                **question.strata,
                "trajectory_id": trajectory.trajectory_id,
                "question_id": question.question_id,
                "iteration": str(trajectory.iteration),
                "policy_version": str(trajectory.policy_version),
                "when": str(self._episode.when),
                "outcome": str(trajectory.outcome),
                IDENTITY_TAG: identity,
            },
            experiment_id=experiment,
            start_time_ns=self._now_ns,
            run_id=run_id,
        )
        traces = InMemoryTraceManager.get_instance()  # type: ignore[no-untyped-call]
        with traces.get_trace(root.trace_id) as trace:  # else the list shows JSON
            trace.info.request_preview = question.text or question.question_id
            trace.info.response_preview = trajectory.answer or f"({trajectory.outcome})"
            trace.info.trace_metadata[TraceMetadataKey.TRACE_SESSION] = question.question_id
        read = 0
        for number, step in enumerate(trajectory.steps):
            self._log_step(root, number, slice(read, step.action_start))
            read = step.action_stop
        outputs = {"answer": trajectory.answer, "outcome": trajectory.outcome}
        status = "OK" if trajectory.success else "ERROR"
        self._client.end_trace(root.trace_id, outputs=outputs, status=status, end_time_ns=self._now_ns)
        return root.trace_id

    def _log_step(self, root: Span, number: int, read: slice) -> None:
        """A span of the tokens that the policy read and sampled, with its tool calls' inside."""
        episode = self._episode
        step = self._trajectory.steps[number]
        span = self._client.start_span(
            f"step {number + 1}",
            root.trace_id,
            root.span_id,
            span_type="LLM",
            inputs={"read": self._text(read)},
            attributes={
                "mlflow.chat.tokenUsage": {  # each token counts once
                    "input_tokens": read.stop - read.start,
                    "output_tokens": step.action_stop - step.action_start,
                    "total_tokens": step.action_stop - read.start,
                },
                "stop_reason": step.stop_reason,
                **({"reward": float(episode.totals[number])} if episode.totals.size else {}),
                "rewards": {name: float(part[number]) for name, part in episode.parts.items() if part[number]},
            },
            start_time_ns=self._now_ns,
        )
        self._now_ns += _duration_ns(step)
        observed = self._text(self._trajectory.replies[number], Source.OBSERVATION)
        for call in step.calls:
            self._log_call(span, call, observed)
        outputs = {"action": self._text(slice(step.action_start, step.action_stop))}
        self._client.end_span(span.trace_id, span.span_id, outputs, end_time_ns=self._now_ns)

    def _log_call(self, parent: Span, call: Call, observed: str) -> None:
        """A span at the end of its step."""
        span = self._client.start_span(
            call.tool or "tool call",
            parent.trace_id,
            parent.span_id,
            span_type="TOOL",
            inputs=json.loads(call.arguments) if call.arguments else {},
            attributes={"call_status": call.status, "latency_s": call.latency_s},
            start_time_ns=self._now_ns - round(1e9 * call.latency_s),
        )
        status = "OK" if call.status is CallStatus.OK else "ERROR"
        outputs = {"observation": observed}
        self._client.end_span(span.trace_id, span.span_id, outputs, status=status, end_time_ns=self._now_ns)

    def _text(self, span: slice, source: Source | None = None) -> str:
        return self._decode(self._trajectory.ids(span, source))


def _duration_ns(step: Step) -> int:
    """What a step took; of one that an earlier version stored, what its slowest tool took."""
    return round(1e9 * max([step.duration_s, *(call.latency_s for call in step.calls)]))
