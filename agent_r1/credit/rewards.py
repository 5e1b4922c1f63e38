"""Rewards: numbers on steps, made of named parts.

The environment states facts on a step (`em` on the answering one, `progress` on a search); every other part
follows from the record. Each part is an array [K], K = steps of the trajectory, before its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from agent_r1.params import RewardWeights
from agent_r1.records import CallStatus, Outcome, Trajectory

Rewards = NDArray[np.float64]


def step_rewards(trajectory: Trajectory, weights: RewardWeights) -> tuple[Rewards, dict[str, Rewards]]:
    """The reward of every step and the parts it is made of.

    Returns:
        [K] the weighted sum of the parts, and name -> [K] each part unweighted. A part of weight 0 is
        among them and adds nothing to the sum.

    Raises:
        ValueError: a reward is not finite, or an answered trajectory carries no `em`; names the trajectory.
    """
    _check_facts(trajectory)
    parts = {name: part(trajectory) for name, part in PARTS.items()}
    totals = np.zeros(len(trajectory.steps))
    for name, weight in weights.model_dump().items():
        totals += weight * parts[name]
    return totals, parts


def agent_r1(trajectory: Trajectory) -> Rewards:
    """On the last step: EM where the format is perfect, else format - 1 (Agent-R1, arXiv 2511.14460, Eq. 6).

    `format` is the mean of two facts, each 0 or 1: the answer block is well formed (the episode ended in an
    answer), and every tool call is (none is malformed; a call that parses and then fails is well formed).
    """
    answered = trajectory.outcome is Outcome.ANSWERED
    well_formed_calls = all(step.call_status is not CallStatus.MALFORMED for step in trajectory.steps)
    if answered and well_formed_calls:
        return _on_last_step(trajectory, trajectory.steps[-1].rewards["em"])
    return _on_last_step(trajectory, (answered + well_formed_calls) / 2 - 1)


def valid_call(trajectory: Trajectory) -> Rewards:
    """1 for every call that succeeded."""
    return _per_step(1.0 if step.call_status is CallStatus.OK else 0.0 for step in trajectory.steps)


def failed_call(trajectory: Trajectory) -> Rewards:
    """-1 for every call that did not succeed, whatever the reason."""
    succeeded = (CallStatus.OK, CallStatus.NONE)
    return _per_step(0.0 if step.call_status in succeeded else -1.0 for step in trajectory.steps)


def progress(trajectory: Trajectory) -> Rewards:
    """The gold passages that a step brought up for the first time, as the environment counted them."""
    return _per_step(step.rewards.get("progress", 0.0) for step in trajectory.steps)


def repeat_call(trajectory: Trajectory) -> Rewards:
    """-1 for every call of the same tool with the same arguments as an earlier one.

    A call whose arguments could not be read repeats nothing: that is for `failed_call`.
    """
    calls = [(step.tool, step.arguments) for step in trajectory.steps]
    return _per_step(-1.0 if all(call) and call in calls[:k] else 0.0 for k, call in enumerate(calls))


def no_answer(trajectory: Trajectory) -> Rewards:
    """-1 on the last step of an episode that did not end in an answer."""
    return _on_last_step(trajectory, 0.0 if trajectory.outcome is Outcome.ANSWERED else -1.0)


PARTS: dict[str, Callable[[Trajectory], Rewards]] = {
    "agent_r1": agent_r1,
    "valid_call": valid_call,
    "failed_call": failed_call,
    "progress": progress,
    "repeat_call": repeat_call,
    "no_answer": no_answer,
}


def _check_facts(trajectory: Trajectory) -> None:
    for k, step in enumerate(trajectory.steps):
        for name, value in step.rewards.items():
            if not np.isfinite(value):
                raise ValueError(
                    f"trajectory {trajectory.trajectory_id!r}: reward {name!r} of step {k} is {value}; "
                    "an environment must state finite numbers"
                )
    if trajectory.outcome is Outcome.ANSWERED and "em" not in trajectory.steps[-1].rewards:
        raise ValueError(
            f"trajectory {trajectory.trajectory_id!r} is answered, but its last step carries no reward 'em'; "
            "the environment must state it on the answering step"
        )


def _per_step(values: Iterable[float]) -> Rewards:
    return np.fromiter(values, dtype=np.float64)


def _on_last_step(trajectory: Trajectory, value: float) -> Rewards:
    """An episode aborted before its first action has no step to put it on."""
    rewards = np.zeros(len(trajectory.steps))
    rewards[-1:] = value
    return rewards
