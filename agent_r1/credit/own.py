"""Rewards of one's own: functions of a finished episode that `train.credit.rewards` names.

They are asked once, when the episodes are collected. Their values are stored as facts on the last step, and weighted
like any other part from there on, by a resumed run and a replay too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

from agent_r1 import own_code
from agent_r1.faults import WorldFault, require_few
from agent_r1.params.credit import RewardFunction, RewardWeights
from agent_r1.records import Call, Decode, Outcome, Question, Source, StopReason, Trajectory

Value = float | WorldFault

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeStep:
    """One step, as text."""

    action: str  # the policy's text, without the token that ends it
    observation: str  # the text that the policy read afterwards, "" where the episode ended
    calls: Sequence[Call]  # its calls: tool, arguments as JSON, status; none for an answer
    facts: Mapping[str, float]  # as the environment stated them


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A finished episode, as a reward function sees it."""

    question: Question
    steps: Sequence[EpisodeStep]  # at least one
    answer: str  # "" without one
    outcome: Outcome


class OwnReward(NamedTuple):
    """A function by its name in params.yaml; it takes an episode, or where it is `batched` some of them."""

    name: str
    params: RewardFunction
    function: Callable[..., Any]


def functions(rewards: RewardWeights) -> list[OwnReward]:
    """The functions that the weights name; a ValueError says which module or function is not there."""
    return [
        OwnReward(name, params, own_code.load(f"credit.rewards.{name}", params.function))
        for name, params in rewards.functions.items()
    ]


def sources(rewards: RewardWeights) -> dict[str, str]:
    """The sha256 of each function's source file, by the name of its reward; raises as `functions`."""
    return {
        f"reward {name}": own_code.source_hash(f"credit.rewards.{name}", params.function)
        for name, params in rewards.functions.items()
    }


def state(
    rewards: Sequence[OwnReward],
    trajectories: Sequence[Trajectory],
    questions: Mapping[str, Question],
    decode: Decode,
    *,
    aborted_share: float,
) -> list[Trajectory]:
    """The trajectories with the values of all rewards as facts on their last steps.

    A function that meets a fault of the world is asked once more; if it meets one again the trajectory is ABORTED.
    Raises TooManyAborted if more than the share are ABORTED, and ValueError, which names reward and trajectory, if a
    function raises anything else or gives no finite number.
    """
    stated = list(trajectories)
    for reward in rewards:
        places = [place for place, trajectory in enumerate(stated) if trajectory.counts]
        values = _ask(reward, [stated[place] for place in places], questions, decode)
        for place, value in zip(places, values, strict=True):
            if isinstance(value, WorldFault):
                stated[place] = replace(stated[place], outcome=Outcome.ABORTED)
                continue
            *steps, last = stated[place].steps
            rewarded = replace(last, rewards={**last.rewards, reward.name: value})
            stated[place] = replace(stated[place], steps=[*steps, rewarded])
    if rewards:
        how = f"rewards included, and env.aborted_share is {aborted_share}"
        require_few(sum(trajectory.aborted for trajectory in stated), len(stated), aborted_share, how)
    return stated


def _ask(
    reward: OwnReward, trajectories: Sequence[Trajectory], questions: Mapping[str, Question], decode: Decode
) -> list[Value]:
    """The value of every trajectory, or the fault that its second attempt met too."""
    episodes = [view(trajectory, questions[trajectory.question_id], decode) for trajectory in trajectories]
    values: dict[int, Value] = {}
    for _ in range(2):
        missing = [place for place in range(len(episodes)) if not isinstance(values.get(place), float)]
        for chunk in [missing] if reward.params.batched and missing else [[place] for place in missing]:
            names = [trajectories[place].trajectory_id for place in chunk]
            values |= zip(chunk, _values(reward, names, [episodes[place] for place in chunk]), strict=True)
    faults = [value for value in values.values() if isinstance(value, WorldFault)]
    if faults:
        logger.warning("reward %s met a fault of the world in %d episodes: %s", reward.name, len(faults), faults[0])
    return [values[place] for place in range(len(episodes))]


def _values(reward: OwnReward, names: Sequence[str], episodes: list[Episode]) -> list[Value]:
    """The checked values of one call; a fault of the world that it raises counts for all its episodes."""
    who = f"credit.rewards.{reward.name} ({reward.params.function}) of trajectory {', '.join(names[:3])}"
    call = reward.function
    try:
        values = list(call(episodes)) if reward.params.batched else [call(episode) for episode in episodes]
    except WorldFault as fault:
        return [fault] * len(episodes)
    except Exception as fault:
        raise ValueError(
            f"{who} raised {type(fault).__name__}: {fault}; mend it, or raise agent_r1.faults.WorldFault where a "
            "server is to blame"
        ) from fault
    if len(values) != len(episodes):
        raise ValueError(f"{who} gave {len(values)} values for {len(episodes)} episodes; give one for each")
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, WorldFault) and not (isinstance(value, Real) and math.isfinite(value)):
            raise ValueError(f"{who}: the value of {name} is {value!r}; give a finite number")
    return [value if isinstance(value, WorldFault) else float(value) for value in values]


def view(trajectory: Trajectory, question: Question, decode: Decode) -> Episode:
    """The typed view of a trajectory of at least one step."""
    steps = []
    for step, reply in zip(trajectory.steps, trajectory.replies, strict=True):
        closed = step.stop_reason is StopReason.END
        steps.append(
            EpisodeStep(
                action=decode(trajectory.ids(slice(step.action_start, step.action_stop - closed))),
                observation=decode(trajectory.ids(reply, Source.OBSERVATION)),
                calls=step.calls,
                facts=step.rewards,
            )
        )
    return Episode(question=question, steps=steps, answer=trajectory.answer, outcome=trajectory.outcome)
