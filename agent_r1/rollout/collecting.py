"""The episodes of a stage: those that this project plays, and those of agents outside."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from agent_r1.envs.base import Attempt
from agent_r1.envs.shared import Shared
from agent_r1.records import Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import Play
from agent_r1.rollout.episodes import collect
from agent_r1.rollout.sampling import Sampler


def collect_all(
    sampler: Sampler, chat: Chat, attempts: Sequence[Attempt], shared: Shared, *, seed: int, play: Play
) -> list[Trajectory]:
    """The trajectories of all attempts, in their order; see `episodes.collect` and `agents.playing.collect`."""
    outside = [index for index, attempt in enumerate(attempts) if attempt.agent]
    if not outside:
        return collect(sampler, chat, attempts, shared, seed=seed, play=play)
    inside = [index for index, attempt in enumerate(attempts) if not attempt.agent]
    trajectories = dict[int, Trajectory]()
    for indices, played in ((inside, collect), (outside, import_module("agent_r1.agents.playing").collect)):
        batch = played(sampler, chat, [attempts[index] for index in indices], shared, seed=seed, play=play)
        trajectories |= zip(indices, batch, strict=True)
    return [trajectories[index] for index in range(len(attempts))]
