"""Rewards: numbers on steps, made of named parts.

The environment states facts on a step: `em`, `f1` and `grounded` where a question is answered, `progress` on a search;
`env`, its own reward, and `success` on the last step in a world that asks for no answer; `think` everywhere. Each other
part follows from the record. Each part is an array [K], K = steps of the trajectory, before its weight. The tests show
how a policy would hack each part if it were paid for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from agent_r1.params.credit import CreditParams, RewardWeights
from agent_r1.records import CallStatus, Floats, Outcome, Trajectory

Part = Callable[[Trajectory], Floats]


def step_rewards(
    trajectory: Trajectory, params: CreditParams, max_tokens: int | None = None
) -> tuple[Floats, dict[str, Floats]]:
    """[K] the reward of every step, the weighted sum of its parts, and name -> [K] each part unweighted.

    An episode that the world cut short earns and loses nothing. `max_tokens` is the limit of a context, which only
    `overlong` needs. A ValueError names its lack, a reward that is not finite, or a missing fact of a weighted part.
    """
    if params.rewards.overlong and max_tokens is None:
        raise ValueError(f"rewards.overlong {params.rewards.overlong} needs env.max_tokens; give it, or set that to 0")
    functions = parts_of(params, max_tokens)
    if not trajectory.counts:
        return np.zeros(len(trajectory.steps)), {name: np.zeros(len(trajectory.steps)) for name in functions}
    _check_facts(trajectory, params.rewards)
    parts = {name: part(trajectory) for name, part in functions.items()}
    totals = np.zeros(len(trajectory.steps))
    for name, weight in params.rewards.weights.items():
        totals += weight * parts[name]
    return totals, parts


def parts_of(params: CreditParams, max_tokens: int | None) -> dict[str, Part]:
    """The named parts, bound to the limits that they read."""
    bound = {"overlong": partial(overlong, max_tokens=max_tokens, buffer=params.overlong_buffer)}
    return PARTS | bound | {name: partial(_stated, fact=name) for name in params.rewards.own}


def _stated(trajectory: Trajectory, fact: str) -> Floats:
    return np.array([step.rewards.get(fact, 0.0) for step in trajectory.steps], np.float64)


def _is_world(trajectory: Trajectory) -> bool:
    """Whether it was played in a world, which states its own reward and asks for no answer."""
    return any("env" in step.rewards for step in trajectory.steps)


def _on_last_step(trajectory: Trajectory, value: float) -> Floats:
    rewards = np.zeros(len(trajectory.steps))
    rewards[-1] = value
    return rewards


def agent_r1(trajectory: Trajectory) -> Floats:
    """On the last step: EM where the format is perfect, else format - 1 (Agent-R1, arXiv 2511.14460, Eq. 6).

    `format` is the mean of two facts, each 0 or 1: the answer block is well formed (the episode ended in an
    answer), and every tool call is (none is malformed; a call that parses and then fails is well formed). A world that
    asks for no answer gives 0.
    """
    if _is_world(trajectory):
        return np.zeros(len(trajectory.steps))
    answered = trajectory.outcome is Outcome.ANSWERED
    well_formed_calls = all(step.call_status is not CallStatus.MALFORMED for step in trajectory.steps)
    if answered and well_formed_calls:
        return _stated(trajectory, "em")
    return _on_last_step(trajectory, (answered + well_formed_calls) / 2 - 1)


def success(trajectory: Trajectory) -> Floats:
    """On the last step: 1 where the episode ended in success."""
    return _on_last_step(trajectory, trajectory.success)


def think(trajectory: Trajectory) -> Floats:
    """1 / K on every step whose well-formed action opens with a thought: at most 1 in all, however many the steps."""
    return _stated(trajectory, "think") / max(len(trajectory.steps), 1)


def valid_call(trajectory: Trajectory) -> Floats:
    """1 for every call that succeeded."""
    return np.array([sum(call.status is CallStatus.OK for call in step.calls) for step in trajectory.steps], np.float64)


def failed_call(trajectory: Trajectory) -> Floats:
    """-1 for every call that did not succeed."""
    return valid_call(trajectory) - [len(step.calls) for step in trajectory.steps]


def repeat_call(trajectory: Trajectory) -> Floats:
    """-1 for every call of the same tool with the same arguments as an earlier one. Unread arguments repeat nothing."""
    past_calls: set[tuple[str, str]] = set()
    rewards = np.zeros(len(trajectory.steps))
    for number, step in enumerate(trajectory.steps):
        for call in step.calls:
            rewards[number] -= (call.tool, call.arguments) in past_calls
            if call.arguments:
                past_calls.add((call.tool, call.arguments))
    return rewards


def no_answer(trajectory: Trajectory) -> Floats:
    """-1 on the last step of an episode that was to end in an answer and did not."""
    owed = trajectory.outcome is not Outcome.ANSWERED and not _is_world(trajectory)
    return _on_last_step(trajectory, -1.0 if owed else 0.0)


def overlong(trajectory: Trajectory, *, max_tokens: int | None, buffer: int) -> Floats:
    """On the last step: 0 for a last context of up to max_tokens - buffer, -1 at max_tokens, in between a line.

    It is -1 too where the next observation would have gone beyond the limit, which ended the episode.

    Source: soft overlong punishment, DAPO (arXiv 2503.14476), Eq. 13.
    """
    if trajectory.outcome is Outcome.TOKEN_LIMIT:
        return _on_last_step(trajectory, -1.0)
    if max_tokens is None or not buffer:
        return _on_last_step(trajectory, 0.0)
    last = trajectory.contexts[-1]
    margin = (max_tokens - buffer - (last.stop - last.start)) / buffer
    return _on_last_step(trajectory, float(np.clip(margin, -1.0, 0.0)))


def length(trajectory: Trajectory) -> Floats:
    """-1 for every token of the step's action."""
    return np.array([step.action_start - step.action_stop for step in trajectory.steps], np.float64)


PARTS: dict[str, Part] = {
    "agent_r1": agent_r1,
    "env": partial(_stated, fact="env"),  # the environment's own reward
    "success": success,
    "em": partial(_stated, fact="em"),  # of the answer, for any format of the calls before
    "f1": partial(_stated, fact="f1"),  # the answer's word overlap with the nearest gold answer, in [0, 1]
    "grounded": partial(_stated, fact="grounded"),  # 1 where the answer, right or wrong, occurs in an observation
    "think": think,
    "valid_call": valid_call,
    "failed_call": failed_call,
    "progress": partial(_stated, fact="progress"),  # gold passages that the step brought up for the first time
    "repeat_call": repeat_call,
    "no_answer": no_answer,
    "length": length,
}


def _check_facts(trajectory: Trajectory, weights: RewardWeights) -> None:
    """Without its fact a weighted part would be 0 in silence. `progress` is let pass: not every step searches."""
    for k, step in enumerate(trajectory.steps):
        for name, value in step.rewards.items():
            if not np.isfinite(value):
                raise ValueError(
                    f"trajectory {trajectory.trajectory_id!r}: reward {name!r} of step {k} is {value}; "
                    "an environment must state finite numbers"
                )
    answer_steps = trajectory.steps[-1:] if trajectory.outcome is Outcome.ANSWERED else []
    weighted = weights.weights
    for name, function in weights.own.items():
        who = function.function or "its agent"
        if function.weight and not any(name in step.rewards for step in trajectory.steps[-1:]):
            raise ValueError(
                f"trajectory {trajectory.trajectory_id!r}: {who} was not asked when it was collected, so "
                f"there is no reward {name!r}; collect anew, or set its weight to 0"
            )
    for part in ("agent_r1", "em", "f1", "grounded", "think"):
        fact = "em" if part == "agent_r1" else part
        steps = trajectory.steps if part == "think" else answer_steps
        if weighted[part] and any(fact not in step.rewards for step in steps):
            raise ValueError(
                f"trajectory {trajectory.trajectory_id!r}: a step{' that answers' * (steps is answer_steps)} carries "
                f"no reward {fact!r}, which {part} is made of; the environment must state it, or the weight must be 0"
            )
