"""Reward parts, each against its definition."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.credit.rewards import parts_of, step_rewards
from agent_r1.params import load
from agent_r1.params.credit import CreditParams, RewardWeights
from agent_r1.records import Call, CallStatus, Outcome
from tests.cases import cases
from tests.credit.letters import trajectory

FILE = Path(__file__).parents[2] / "params.yaml"
CREDIT = load(FILE).train.credit


def weights(**given: float) -> CreditParams:
    rewards = RewardWeights.model_validate({**dict.fromkeys(RewardWeights.model_fields, 0.0), **given})
    return CREDIT.model_copy(update={"rewards": rewards})


def call(status: CallStatus, arguments: str = '{"query": "x"}', **rewards: float) -> dict[str, Any]:
    malformed = status is CallStatus.MALFORMED
    made = Call(status=status) if malformed else Call(tool="search", arguments=arguments, status=status)
    return {"calls": [made], "rewards": rewards}


def answer(em: float, **rewards: float) -> dict[str, Any]:
    return {"rewards": {"em": em, "f1": em, **rewards}}


def test_every_weight_has_a_part() -> None:
    assert set(parts_of(CREDIT, None)) == set(RewardWeights.model_fields)


@cases("first_call, em, outcome, expected")
def test_agent_r1_equation_6(first_call: str, em: float, outcome: str, expected: float) -> None:
    answered = outcome == Outcome.ANSWERED
    episode = trajectory(
        "PAAOTAA", [call(CallStatus(first_call)), answer(em) if answered else {}], outcome=Outcome(outcome)
    )
    totals, _ = step_rewards(episode, weights(agent_r1=1.0))
    assert totals.tolist() == [0.0, expected]


def test_process_parts_sit_on_their_steps() -> None:
    again = '{"query": "y"}'
    episode = trajectory(
        "PAOAOAOAOAOA",
        [
            call(CallStatus.OK, progress=2.0),
            call(CallStatus.OK, again, progress=1.0),
            call(CallStatus.MALFORMED),
            call(CallStatus.OK),  # repeats the first
            call(CallStatus.TIMEOUT, again),  # repeats the second
            call(CallStatus.MALFORMED),  # names no tool, so it repeats nothing
        ],
    )
    _, parts = step_rewards(episode, weights(agent_r1=1.0))
    assert parts["valid_call"].tolist() == [1, 1, 0, 1, 0, 0]
    assert parts["failed_call"].tolist() == [0, 0, -1, 0, -1, -1]
    assert parts["progress"].tolist() == [2, 1, 0, 0, 0, 0]
    assert parts["repeat_call"].tolist() == [0, 0, 0, -1, -1, 0]
    assert parts["no_answer"].tolist() == [0, 0, 0, 0, 0, -1]
    assert parts["agent_r1"].tolist() == [0, 0, 0, 0, 0, -1]  # neither the answer nor every call is well formed


def test_parts_of_the_answer_are_what_the_environment_states() -> None:
    """Unlike in agent_r1, a malformed call before does not touch them."""
    steps = [call(CallStatus.MALFORMED), answer(0.0, f1=0.5, grounded=1.0)]
    totals, parts = step_rewards(
        trajectory("PAOA", steps, outcome=Outcome.ANSWERED), weights(em=4.0, f1=2.0, grounded=0.25)
    )
    assert parts["em"].tolist() == [0, 0]
    assert parts["f1"].tolist() == [0, 0.5]
    assert parts["grounded"].tolist() == [0, 1]
    assert totals.tolist() == [0, 1.25]


def test_thoughts_share_out_1_over_the_steps() -> None:
    # Four steps, three of which think: a quarter each.
    steps = [call(CallStatus.OK, think=thought) for thought in (1.0, 0.0, 1.0, 1.0)]
    totals, parts = step_rewards(trajectory("PAOAOAOA", steps), weights(think=2.0))
    assert parts["think"].tolist() == [0.25, 0, 0.25, 0.25]
    assert totals.tolist() == [0.5, 0, 0.5, 0.5]


def test_same_arguments_of_another_tool_and_unread_arguments_are_no_repeat() -> None:
    other = Call(tool="calculator", arguments='{"query": "x"}', status=CallStatus.OK)
    unread = call(CallStatus.BAD_ARGUMENTS, "")
    calls = [call(CallStatus.OK), {"calls": [other]}, unread, unread]
    _, parts = step_rewards(trajectory("PAOAOAOA", calls), weights(agent_r1=1.0))
    assert parts["repeat_call"].tolist() == [0, 0, 0, 0]
    assert parts["failed_call"].tolist() == [0, 0, -1, -1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_refused(value: float) -> None:
    episode = trajectory("PA", [call(CallStatus.OK, progress=value)], name="3/q7/1")
    with pytest.raises(ValueError, match=r"3/q7/1.*'progress' of step 0"):
        step_rewards(episode, weights(agent_r1=1.0))


@pytest.mark.parametrize(
    ("part", "fact"), [("agent_r1", "em"), ("em", "em"), ("f1", "f1"), ("grounded", "grounded"), ("think", "think")]
)
def test_a_weighted_part_whose_fact_is_not_stated_is_refused(part: str, fact: str) -> None:
    stated = {"em": 1.0, "f1": 1.0, "grounded": 1.0, "think": 1.0}
    del stated[fact]
    episode = trajectory("PA", [{"rewards": stated}], outcome=Outcome.ANSWERED, name="3/q7/1")
    with pytest.raises(ValueError, match=rf"3/q7/1.*no reward '{fact}', which {part} is made of"):
        step_rewards(episode, weights(**{part: 0.1}))
    others = {"f1": 1.0} if fact == "em" else {"em": 1.0}
    assert step_rewards(episode, weights(**others))[1][part].tolist() == [0.0]


def test_an_episode_that_the_world_cut_short_earns_and_loses_nothing() -> None:
    found = {"rewards": {"progress": 1.0}, "calls": [Call(tool="search", status=CallStatus.OK)]}
    failed = {"calls": [Call(tool="search", status=CallStatus.FAILED)]}
    episode = trajectory("PAOA", [found, failed], outcome=Outcome.ABORTED)
    totals, parts = step_rewards(episode, weights(agent_r1=1.0, progress=1.0, failed_call=1.0, no_answer=1.0))
    assert totals.tolist() == [0, 0]
    assert {tuple(part) for part in parts.values()} == {(0, 0)}


@cases("letters, outcome, expected")
def test_overlong_falls_towards_the_token_limit(letters: str, outcome: str, expected: float) -> None:
    """DAPO, Eq. 13."""
    priced = weights(overlong=2.0).model_copy(update={"overlong_buffer": 4})
    episode = trajectory(letters, outcome=Outcome(outcome))
    totals, parts = step_rewards(episode, priced, 10)
    assert parts["overlong"][-1] == expected
    assert totals.sum() == 2 * expected
    with pytest.raises(ValueError, match=r"rewards\.overlong 2\.0 needs env\.max_tokens"):
        step_rewards(episode, priced)


def test_overlong_looks_at_the_last_context() -> None:
    """Eight tokens in all, and five since the context was written anew: one of them in the buffer."""
    split = replace(trajectory("PAAPPPPA"), context_starts=[0, 3])
    priced = weights(overlong=1.0).model_copy(update={"overlong_buffer": 2})
    assert step_rewards(split, priced, 6)[1]["overlong"].tolist() == [0, -0.5]


def test_length_prices_every_action_token_on_its_step() -> None:
    totals, parts = step_rewards(trajectory("PAAAOTA"), weights(length=0.5))
    assert parts["length"].tolist() == [-3, -1]
    assert totals.tolist() == [-1.5, -0.5]


def test_of_several_calls_of_an_action_each_counts() -> None:
    """Twice the same at once, one of them failed; then the first again: one repeats the other, and one both."""
    [made], [failed] = call(CallStatus.OK)["calls"], call(CallStatus.FAILED, '{"query": "y"}')["calls"]
    calls = [{"calls": [made, failed, made], "rewards": {}}, {"calls": [made], "rewards": {}}]
    _, parts = step_rewards(trajectory("PAOA", calls), weights(agent_r1=1.0))
    assert parts["valid_call"].tolist() == [2, 1]
    assert parts["failed_call"].tolist() == [-1, 0]
    assert parts["repeat_call"].tolist() == [-1, -1]


def test_what_the_environment_gives_and_what_it_calls_right() -> None:
    """-.1 and then 10.9, solved: step by step, and 1 on the last; of an answered question right is exact match."""
    steps = [{"rewards": {"env": -0.1}}, {"rewards": {"env": 10.9, "success": 1.0}}]
    totals, parts = step_rewards(trajectory("PAOA", steps, outcome=Outcome.ENDED), weights(env=0.5, success=2.0))
    assert totals.tolist() == [-0.05, 7.45]
    assert (parts["env"].tolist(), parts["success"].tolist()) == ([-0.1, 10.9], [0, 1])
    assert (parts["agent_r1"].tolist(), parts["no_answer"].tolist()) == ([0, 0], [0, 0]), "nobody asked for an answer"
    answered = trajectory("PAOA", [{}, {"rewards": {"em": 1.0, "f1": 1.0}}], outcome=Outcome.ANSWERED)
    assert step_rewards(answered, weights(success=1.0))[0].tolist() == [0, 1]
