"""Records check themselves and refuse by the name of the field."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from agent_r1.records import (
    LONGEST_STATE,
    CallStatus,
    Credit,
    Outcome,
    Passage,
    Question,
    Source,
    Step,
    StopReason,
    Trajectory,
)


def question(**changes: Any) -> Question:
    fields: dict[str, Any] = {
        "question_id": "q1",
        "dataset": "atlas",
        "split": "train",
        "text": "Where was Mara Quill born?",
        "answers": ["Tesk"],
        "gold_titles": ["Mara Quill"],
        "strata": {"hops": "1", "kind": "lookup"},
    }
    return Question(**{**fields, **changes})


def step(action_start: int = 1, action_stop: int = 3) -> Step:
    return Step(
        action_start=action_start,
        action_stop=action_stop,
        stop_reason=StopReason.END,
        calls=[],
        rewards={},
    )


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "trajectory_id": "0/q1/0",
        "question_id": "q1",
        "group": 0,
        "sample": 0,
        "seed": 0,
        "policy_version": 0,
        "iteration": 0,
        "token_ids": np.array([5, 6, 7, 8], dtype=np.int32),
        "source": np.array([0, 1, 1, 3], dtype=np.uint8),
        "logprobs": np.array([0, -1, -2, 0], dtype=np.float32),
        "context_starts": [0],
        "steps": [step()],
        "outcome": Outcome.ANSWERED,
        "answer": "Tesk",
    }
    return Trajectory(**{**fields, **changes})


def test_a_state_of_a_step_has_a_limit() -> None:
    assert dataclasses.replace(step(), state="x" * LONGEST_STATE).state
    with pytest.raises(ValueError, match="step: field 'state' has 257 characters; it holds at most 256"):
        dataclasses.replace(step(), state="x" * (LONGEST_STATE + 1))


FLOATS = ("advantages", "values", "value_targets", "reference_logprobs")


def credit(**changes: Any) -> Credit:
    fields: dict[str, Any] = {
        "trajectory_id": "0/q1/0",
        "return_": 1.0,
        **{name: np.zeros(4, dtype=np.float32) for name in FLOATS},
        **{name: np.zeros(4, dtype=np.bool_) for name in ("loss_mask", "critic_mask")},
        "kept": True,
    }
    return Credit(**{**fields, **changes})


@pytest.mark.parametrize("text", ["", "  \n"])
def test_a_question_without_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="question 'q1': field 'text' is empty"):
        question(text=text)


@pytest.mark.parametrize("answers", [[], [""], ["Tesk", " "]])
def test_a_question_without_answers_is_refused(answers: list[str]) -> None:
    with pytest.raises(ValueError, match="question 'q1': field 'answers'"):
        question(answers=answers)


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (3, 2), (-1, 2)])
def test_a_step_without_a_token_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        step(start, stop)


@pytest.mark.parametrize("name", ["source", "logprobs"])
def test_a_trajectory_of_uneven_arrays_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"trajectory '0/q1/0': field '{name}' has 3 entries for 4 tokens"):
        trajectory(**{name: np.zeros(3)})


def test_a_step_beyond_the_last_token_is_refused() -> None:
    with pytest.raises(ValueError, match="a step ends after token 4"):
        trajectory(steps=[step(1, 5)])


@pytest.mark.parametrize("starts", [[], [1], [0, 3, 3], [0, 3, 2], [0, 4]])
def test_contexts_that_do_not_rise_are_refused(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="it begins with 0 and rises"):
        trajectory(context_starts=starts)


def test_a_context_that_begins_within_an_action_is_refused() -> None:
    with pytest.raises(ValueError, match="cuts an action in two"):
        trajectory(context_starts=[0, 2])


def test_contexts_are_the_spans_between_their_starts() -> None:
    assert trajectory().contexts == [slice(0, 4)]
    assert trajectory(context_starts=[0, 3]).contexts == [slice(0, 3), slice(3, 4)]


@pytest.mark.parametrize("name", ["values", "value_targets", "reference_logprobs", "loss_mask", "critic_mask"])
def test_a_credit_of_uneven_arrays_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"credit of '0/q1/0': field '{name}' has 5 entries"):
        credit(**{name: np.zeros(5)})


def test_the_action_mask_is_where_the_source_says_so() -> None:
    assert trajectory().action_mask.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("outcome", "stop_reason", "truncated"),
    [
        (Outcome.ANSWERED, StopReason.END, False),
        (Outcome.MALFORMED, StopReason.END, False),
        (Outcome.ABORTED, StopReason.END, False),
        (Outcome.TOKEN_LIMIT, StopReason.END, True),
        (Outcome.TURN_LIMIT, StopReason.END, True),
        (Outcome.ANSWERED, StopReason.LENGTH, True),
    ],
)
def test_truncated_is_what_a_limit_cut(outcome: Outcome, stop_reason: StopReason, truncated: bool) -> None:
    steps = [dataclasses.replace(step(), stop_reason=stop_reason)]
    assert trajectory(outcome=outcome, steps=steps).truncated == truncated


def test_records_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        question().text = "another"  # type: ignore[misc]


def test_records_take_names_only() -> None:
    with pytest.raises(TypeError):
        Passage("p1", "Mara Quill", "Mara Quill was born in Tesk.")  # type: ignore[call-arg]


def test_stored_numbers_and_names_do_not_move() -> None:
    # Parquet files of earlier runs hold these values.
    assert {source.name: source.value for source in Source} == {
        "PROMPT": 0,
        "ACTION": 1,
        "OBSERVATION": 2,
        "TEMPLATE": 3,
        "DEMONSTRATION": 4,
    }
    assert " ".join(CallStatus) == "ok malformed unknown_tool bad_arguments failed timeout none"
    assert " ".join(Outcome) == "answered ended turn_limit token_limit malformed aborted"
