"""How much the thoughts of an iteration say of their inputs.

Source: RAGEN-2 (arXiv 2604.06268), its estimates of mutual information and its retrieval accuracy.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from agent_r1.learn.learner import Learner
from agent_r1.records import Decode, Floats, Metrics, Trajectory
from agent_r1.rollout.sampling import Action
from agent_r1.training.watch import with_action

CROSSED = 16  # thoughts that are read under each other's inputs


def thoughts(trajectories: Sequence[Trajectory], learner: Learner) -> Metrics:
    """The metrics of the first thoughts by the learner's weights; empty where fewer than two groups think."""

    def decode(ids: Sequence[int]) -> str:
        return str(learner.tokenizer.decode(list(ids), skip_special_tokens=False))

    rows = crossed(trajectories, decode)
    if len(rows) < 2:
        return {}
    logprobs = zip(rows, learner.logprobs(rows), strict=True)
    scores = np.array([scored[row.action_mask].sum(dtype=np.float64) for row, scored in logprobs])
    return thought_metrics(scores.reshape(-1, math.isqrt(len(scores))))


def thought_metrics(scores: Floats) -> Metrics:
    """How much thoughts say of their inputs, from the logprob [T, T] in nats of each thought, a row, under each input.

    `thought/information` is the mean of log p(z | x) - log mean_j p(z | x_j), at most log T; `thought/retrieved` is the
    share of thoughts that are likeliest under their own input. Thoughts alike for all inputs have 0 and 1 / T.
    """
    matching = scores.diagonal()
    alike = np.logaddexp.reduce(scores, axis=1) - np.log(len(scores))
    retrieved = scores.argmax(axis=1) == np.arange(len(scores))
    return {"thought/information": float(np.mean(matching - alike)), "thought/retrieved": float(np.mean(retrieved))}


def crossed(trajectories: Sequence[Trajectory], decode: Decode) -> list[Trajectory]:
    """[T * T] the thought of each first action, as if it had been sampled in each of the first contexts.

    Of one trajectory per group, the first that thinks, and of at most `CROSSED` groups.
    """
    groups: dict[int, tuple[Trajectory, Action]] = {}
    for trajectory in trajectories:
        if trajectory.group in groups or len(groups) == CROSSED:
            continue
        thought = _first_thought(trajectory, decode)
        if thought:
            groups[trajectory.group] = trajectory, thought
    pairs = groups.values()
    return [with_action(trajectory, thought) for _, thought in pairs for trajectory, _ in pairs]


def _first_thought(trajectory: Trajectory, decode: Decode) -> Action | None:
    """The tokens of a first action up to the tag that closes its thought; None without one."""
    if not trajectory.steps:
        return None
    ids = trajectory.ids(slice(trajectory.steps[0].action_start, trajectory.steps[0].action_stop))
    length = bisect_left(range(len(ids) + 1), True, key=lambda count: "</think>" in decode(ids[:count]))
    return Action.of(ids[:length], [0.0] * length, ()) if length <= len(ids) else None
