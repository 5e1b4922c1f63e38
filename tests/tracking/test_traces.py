"""Traces in a real SQLite store: what they tell, whose they are, and that none is there twice."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.entities import Trace

from agent_r1 import tracking
from agent_r1.records import Call, CallStatus, Question, Source
from agent_r1.tracking.traces import Rewarded
from tests.trajectories import from_parts, question_fields

ROOT = Path(__file__).parents[2]
WORDS = ["Where?", "<think>", "Tesk: a city.", "<answer>", "<frame>"]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in token_ids)


def episode(trajectory_id: str = "3/q/0", status: CallStatus = CallStatus.OK) -> Rewarded:
    """A prompt, a call, `frame observation frame`, an answer."""
    call = Call(tool="search", arguments='{"query": "city"}', status=status, latency_s=0.25)
    prompt, action, observed, frame = Source.PROMPT, Source.ACTION, Source.OBSERVATION, Source.TEMPLATE
    parts = [(prompt, [0]), (action, [1]), (frame, [4]), (observed, [2]), (frame, [4]), (action, [3])]
    steps = [{"calls": [call], "duration_s": 0.75}, {"rewards": {"em": 1.0}, "duration_s": 0.5}]
    trajectory = from_parts(parts, steps, trajectory_id=trajectory_id, policy_version=2, iteration=3)
    rewards = {"em": np.array([0.0, 1.0]), "progress": np.array([1.0, 0.0]), "no_answer": np.zeros(2)}
    question = Question(**question_fields(text="Where?"))
    return Rewarded("training", question, trajectory, np.array([0.5, 1.0]), rewards)


@pytest.fixture
def run(tmp_path: Path, lay_store: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> tracking.Run:
    lay_store(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tracking.start("ppo", {"seed": 0}, {})


def traces(run: tracking.Run) -> list[Trace]:
    client = MlflowClient(f"sqlite:///{Path.cwd()}/.tracking/mlflow.db")
    experiment = client.get_run(run.run_id).info.experiment_id
    return list(client.search_traces(locations=[experiment], run_id=run.run_id))


def test_trace_has_steps_calls_and_rewards(run: tracking.Run) -> None:
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
    assert seconds == {"episode": 1.25, "step 1": 0.75, "search": 0.25, "step 2": 0.5}
    assert spans["search"].end_time_ns == spans["step 1"].end_time_ns == spans["step 2"].start_time_ns
    assessments = {assessment.name: assessment.value for assessment in trace.info.assessments or []}
    rewards = {"return": 1.5, "right": True, "em": 1.0, "progress": 1.0, "no_answer": 0.0}
    assert assessments == {"gold answers": ["Tesk"], **rewards}
    assert "MLFLOW_TRACKING_URI" not in os.environ, "the store of the process is left as it was"
    assert (trace.info.request_preview, trace.info.response_preview) == ("Where?", "Tesk"), "as MLflow's list shows it"
    assert (trace.info.state, trace.info.trace_metadata["mlflow.trace.session"]) == ("OK", "q"), "right, of question q"
    assert trace.info.token_usage == {"input_tokens": 4, "output_tokens": 2, "total_tokens": 6}


def test_samples_of_a_question_are_a_session_whose_states_say_right_or_wrong(run: tracking.Run) -> None:
    right = episode("3/q/0")
    wrong = dataclasses.replace(right.trajectory, trajectory_id="3/q/1", steps=right.trajectory.steps[:1])
    tracking.log_traces(
        run.run_id, [right, dataclasses.replace(right, trajectory=wrong, totals=np.zeros(1), parts={})], decode
    )
    infos = {trace.info.tags["trajectory_id"]: trace.info for trace in traces(run)}
    assert {name: str(info.state) for name, info in infos.items()} == {"3/q/0": "OK", "3/q/1": "ERROR"}
    assert {info.trace_metadata["mlflow.trace.session"] for info in infos.values()} == {"q"}


def test_step_that_an_earlier_version_stored_lasts_as_long_as_its_tool(run: tracking.Run) -> None:
    played = episode()
    steps = [dataclasses.replace(step, duration_s=0.0) for step in played.trajectory.steps]
    played = dataclasses.replace(played, trajectory=dataclasses.replace(played.trajectory, steps=steps))
    tracking.log_traces(run.run_id, [played], decode)
    assert traces(run)[0].info.execution_duration == 250


def test_episode_that_was_not_trained_on_has_no_rewards(run: tracking.Run) -> None:
    played = episode()
    assert tracking.log_traces(run.run_id, [Rewarded("test", played.question, played.trajectory)], decode) == 1
    [trace] = traces(run)
    assert {assessment.name: assessment.value for assessment in trace.info.assessments or []} == {
        "gold answers": ["Tesk"],
        "right": True,
    }
    assert not any("reward" in span.attributes for span in trace.data.spans)


def test_call_that_failed_is_an_error(run: tracking.Run) -> None:
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
