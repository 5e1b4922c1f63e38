"""Records check themselves and refuse by the name of the field."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from agent_r1.records import CallStatus, Credit, Outcome, Question, Source, Step, StopReason, Trajectory
from tests.cases import cases
from tests.trajectories import from_parts, question_fields


def question(**changes: Any) -> Question:
    return Question(**question_fields("q1", **changes))


def step(action_start: int = 1, action_stop: int = 3) -> Step:
    return Step(action_start=action_start, action_stop=action_stop, stop_reason=StopReason.END, calls=[], rewards={})


def trajectory(**changes: Any) -> Trajectory:
    parts = [(Source.PROMPT, [5]), (Source.ACTION, [6, 7]), (Source.TEMPLATE, [8])]
    return replace(from_parts(parts, trajectory_id="0/q1/0", question_id="q1"), **changes)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((partial(question, text=text), "question 'q1': field 'text' is empty") for text in ("", "  \n")),
        *((partial(question, answers=given), "question 'q1': field 'answers'") for given in ([], [""], ["Tesk", " "])),
        *((partial(step, *span), "at least one") for span in ((3, 3), (3, 2), (-1, 2))),
        (partial(trajectory, source=np.zeros(3)), "trajectory '0/q1/0': field 'source' has 3 entries for 4 tokens"),
        (partial(trajectory, logprobs=np.zeros(3)), "trajectory '0/q1/0': field 'logprobs' has 3 entries for 4 tokens"),
        (partial(trajectory, steps=[step(1, 5)]), "a step ends after token 4"),
        *(
            (partial(trajectory, context_starts=starts), "it begins with 0 and rises")
            for starts in ([], [1], [0, 3, 3], [0, 3, 2], [0, 4])
        ),
        (partial(trajectory, context_starts=[0, 2]), "cuts an action in two"),
        *(
            (partial(credit, **{name: np.zeros(5)}), f"credit of '0/q1/0': field '{name}' has 5 entries")
            for name in (*FLOATS[1:], "loss_mask", "critic_mask")
        ),
        (partial(replace, step(), state="x" * 257), "step: field 'state' has 257 characters; it holds at most 256"),
    ],
)
def test_a_record_that_cannot_be_is_refused_by_its_field(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_contexts_are_the_spans_between_their_starts_and_the_action_mask_is_where_the_source_says_so() -> None:
    assert trajectory().contexts == [slice(0, 4)]
    assert trajectory(context_starts=[0, 3]).contexts == [slice(0, 3), slice(3, 4)]
    assert trajectory().action_mask.tolist() == [False, True, True, False]


@cases("outcome, stop_reason, truncated")
def test_truncated_is_what_a_limit_cut(outcome: str, stop_reason: str, truncated: bool) -> None:
    steps = [replace(step(), stop_reason=StopReason(stop_reason))]
    assert trajectory(outcome=Outcome(outcome), steps=steps).truncated == truncated


def test_stored_numbers_and_names_do_not_move() -> None:
    # Parquet files of earlier runs hold these values.
    assert " ".join(source.name for source in Source) == "PROMPT ACTION OBSERVATION TEMPLATE DEMONSTRATION"
    assert [*map(int, Source)] == [0, 1, 2, 3, 4]
    assert " ".join(CallStatus) == "ok malformed unknown_tool bad_arguments failed timeout none"
    assert " ".join(Outcome) == "answered ended turn_limit token_limit malformed aborted"
