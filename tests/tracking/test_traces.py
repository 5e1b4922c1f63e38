"""Traces in a real SQLite store: what they tell, whose they are, and that none is there twice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.entities import Trace
from numpy.typing import NDArray

from agent_r1 import tracking
from agent_r1.records import Call, CallStatus, Outcome, Question, Source, Step, StopReason, Trajectory

ROOT = Path(__file__).parents[2]
WORDS = ["Where?", "<think>", "Tesk: a city.", "<answer>", "<frame>"]


@dataclass(frozen=True)
class Episode:
    trajectory: Trajectory
    question: Question
    when: str
    right: bool
    totals: NDArray[np.float64]
    parts: dict[str, NDArray[np.float64]]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in token_ids)


def episode(trajectory_id: str = "3/q/0", status: CallStatus = CallStatus.OK) -> Episode:
    """A prompt, a call, `frame observation frame`, an answer."""
    call = Step(
        action_start=1,
        action_stop=2,
        stop_reason=StopReason.END,
        calls=[Call(tool="search", arguments='{"query": "city"}', status=status, latency_s=0.25)],
        rewards={},
    )
    answer = replace(call, action_start=5, action_stop=6, calls=[])
    trajectory = Trajectory(
        trajectory_id=trajectory_id,
        question_id="q",
        group=0,
        sample=0,
        seed=0,
        policy_version=2,
        iteration=3,
        token_ids=np.array([0, 1, 4, 2, 4, 3], np.int32),
        source=np.array([Source.PROMPT, Source.ACTION, 3, Source.OBSERVATION, 3, Source.ACTION], np.uint8),
        logprobs=np.zeros(6, np.float32),
        context_starts=[0],
        steps=[call, answer],
        outcome=Outcome.ANSWERED,
        answer="Tesk",
    )
    question = Question(
        question_id="q",
        dataset="atlas",
        split="train",
        text="Where?",
        answers=["Tesk"],
        gold_titles=["Tesk"],
        strata={"hops": "1", "kind": "lookup"},
    )
    parts = {"em": np.array([0.0, 1.0]), "progress": np.array([1.0, 0.0]), "no_answer": np.zeros(2)}
    return Episode(trajectory, question, "training", True, np.array([0.5, 1.0]), parts)


@pytest.fixture
def run(tmp_path: Path, lay_store: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> tracking.Run:
    """A run in a store of its own."""
    lay_store(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tracking.start("ppo", {"seed": 0}, {})


def traces(run: tracking.Run) -> list[Trace]:
    client = MlflowClient(f"sqlite:///{Path.cwd()}/.tracking/mlflow.db")
    experiment = client.get_run(run.run_id).info.experiment_id
    return list(client.search_traces(locations=[experiment], run_id=run.run_id))


def test_a_trace_tells_what_the_agent_did(run: tracking.Run) -> None:
    assert tracking.log_traces(run.run_id, [episode()], decode) == 1
    [trace] = traces(run)
    tags = {"trajectory_id": "3/q/0", "question_id": "q", "iteration": "3", "when": "training", "outcome": "answered"}
    assert tags.items() <= trace.info.tags.items()
    spans = {span.name: span for span in trace.data.spans}
    assert [span.span_type for span in spans.values()].count("LLM") == 2
    assert set(spans) == {"episode", "step 1", "search", "step 2"}
    assert spans["episode"].inputs == {"question": "Where?"}
    assert spans["episode"].outputs == {"answer": "Tesk", "outcome": "answered"}
    assert spans["step 1"].inputs == {"read": "Where?"}
    assert spans["step 1"].outputs == {"action": "<think>"}
    assert spans["search"].inputs == {"query": "city"}
    assert spans["search"].outputs == {"observation": "Tesk: a city."}
    assert spans["search"].parent_id == spans["step 1"].span_id
    assert spans["step 2"].inputs == {"read": "<frame>Tesk: a city.<frame>"}
    assert spans["step 2"].attributes["reward"] == 1.0
    seconds = {name: (int(span.end_time_ns or 0) - int(span.start_time_ns or 0)) / 1e9 for name, span in spans.items()}
    assert seconds == {"episode": 0.25, "step 1": 0.25, "search": 0.25, "step 2": 0.0}, "only the tool takes time"
    given = {each.name: each.value for each in trace.info.assessments or []}
    rewards = {"return": 1.5, "right": True, "em": 1.0, "progress": 1.0, "no_answer": 0.0}
    assert given == {"gold answers": ["Tesk"], **rewards}
    assert "MLFLOW_TRACKING_URI" not in os.environ, "the store of the process is left as it was"


def test_a_call_that_failed_is_an_error(run: tracking.Run) -> None:
    tracking.log_traces(run.run_id, [episode(status=CallStatus.TIMEOUT)], decode)
    [trace] = traces(run)
    status = {span.name: span.status.status_code for span in trace.data.spans}
    assert (status["search"], status["episode"]) == ("ERROR", "OK")


def test_no_trajectory_is_traced_twice(run: tracking.Run) -> None:
    assert tracking.log_traces(run.run_id, [episode("3/q/0"), episode("3/q/1")], decode) == 2
    assert tracking.log_traces(run.run_id, [episode("3/q/1"), episode("3/q/2")], decode) == 1
    assert len(traces(run)) == 3
    other = tracking.start("grpo", {"seed": 0}, {})
    assert tracking.log_traces(other.run_id, [episode("3/q/0")], decode) == 1, "a run has traces of its own"
