"""How alike the trajectories of different questions are: signs of the Echo Trap (RAGEN, arXiv 2504.20073).

Trajectories of one question may well agree, so only those of different questions are compared. What the samples of a
policy share because the format asks for it (tags, the frame of a call) counts too: the level says little, a rise much.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agent_r1.answers import normalize
from agent_r1.records import Trajectory

NGRAM = 4  # tokens; short enough for a bare answer, long enough that two questions rarely share one by chance
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd and without structure: the golden ratio of 2^64


def repetition_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Repetition of answers and of thoughts, both in [0, 1]; nothing where all trajectories are of one question."""
    if len({trajectory.group for trajectory in trajectories}) < 2:
        return {}
    return {
        "rollout/answer_repetition": answer_repetition(trajectories),
        "rollout/thought_repetition": thought_repetition(trajectories),
    }


def answer_repetition(trajectories: Sequence[Trajectory]) -> float:
    """The share of the most frequent answer, normalised for comparison; every question weighs the same.

    An episode without an answer repeats nothing.
    """
    sizes = Counter(trajectory.group for trajectory in trajectories)
    shares: defaultdict[str, float] = defaultdict(float)
    for trajectory in trajectories:
        shares[normalize(trajectory.answer)] += 1 / sizes[trajectory.group]
    shares.pop("", None)
    return max(shares.values(), default=0.0) / len(sizes)


def thought_repetition(trajectories: Sequence[Trajectory], length: int = NGRAM) -> float:
    """The chance that an n-gram of one trajectory also occurs in a trajectory of another question.

    Over the distinct n-grams, `length` token ids in a row within one action, of every trajectory: the mean share of
    the trajectories of other questions that hold the n-gram. 0 where no action is that long.
    """
    rows = [np.unique(_ngrams(trajectory, length)) for trajectory in trajectories]
    groups = np.array([trajectory.group for trajectory in trajectories])
    owners = np.repeat(groups, [len(row) for row in rows])  # [N] the question of each n-gram, N over all trajectories
    if not len(owners):
        return 0.0
    _, ngrams = np.unique(np.concatenate(rows), return_inverse=True)
    _, pairs = np.unique(ngrams * (groups.max() + 1) + owners, return_inverse=True)
    elsewhere = np.bincount(ngrams)[ngrams] - np.bincount(pairs)[pairs]
    others = len(groups) - np.bincount(groups)[owners]
    return float((elsewhere / others).mean())


def _ngrams(trajectory: Trajectory, length: int) -> NDArray[np.uint64]:
    """A 64-bit fingerprint of every n-gram of the actions: the value of a polynomial in its token ids."""
    ids = trajectory.token_ids.astype(np.uint64)
    spans = [np.arange(step.action_start, step.action_stop - length + 1) for step in trajectory.steps]
    starts = np.concatenate([np.zeros(0, np.intp), *spans])
    prints = np.zeros(len(starts), np.uint64)
    for offset in range(length):
        prints = prints * MULTIPLIER + ids[starts + offset]
    return prints
