"""Which trajectories go into a page: few enough to load at once, and those that are worth a look."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from agent_r1.records import Trajectory
from agent_r1.seeds import derive
from agent_r1.viewer.shown import Shown

T = TypeVar("T")

PER_ITERATION = 5


def spread(count: int, at_most: int) -> list[int]:
    """At most so many of `range(count)`, the first and the last among them, evenly apart."""
    if count <= at_most:
        return list(range(count))
    if at_most < 2:
        return [count - 1][:at_most]
    return [round(place * (count - 1) / (at_most - 1)) for place in range(at_most)]


def quotas(iterations: int, count: int, recurring: int) -> list[int]:
    """How many trajectories each of the iterations gives to a page of `count`.

    The first and the last give up to a quarter each for questions that occur in both; the rest is shared evenly.
    """
    if not iterations:
        return []
    extra = min(recurring, count // 4) if iterations > 1 else 0
    share, left = divmod(count - 2 * extra, iterations)
    even = [share + (place < left) for place in range(iterations)]
    return [each + extra * (place in (0, iterations - 1)) for place, each in enumerate(even)]


def from_iteration(
    trajectories: Sequence[Trajectory], count: int, *, recurring: Collection[str], proved: Collection[str], seed: int
) -> list[Trajectory]:
    """The trajectories of one iteration that a page shows.

    First those of questions that recur in another iteration, each question once before any twice and in an order that
    is the same in both; then those whose logprobs the learner has confirmed; otherwise in a random order.

    Args:
        trajectories: of the iteration.
        count: how many at most.
        recurring: ids of the questions that recur.
        proved: ids of the trajectories that the learner was asked about.
        seed: of the order.
    """

    def rank(trajectory: Trajectory) -> tuple[int, int, int]:
        if trajectory.question_id in recurring:
            return 0, trajectory.sample, derive(seed, trajectory.question_id)
        return 1, trajectory.trajectory_id not in proved, derive(seed, trajectory.trajectory_id)

    return sorted(trajectories, key=rank)[:count]


def pairs(before: Sequence[Shown], after: Sequence[Shown], count: int, *, seed: int) -> list[list[Shown]]:
    """Answers of two policies to the same question: as many of every kind of change as there are, in turns.

    The kinds are wrong then right, right then wrong, wrong twice, right twice; within a kind the order is random.
    """
    earlier = {shown.question.question_id: shown for shown in before}
    both = [[earlier[later.question.question_id], later] for later in after if later.question.question_id in earlier]
    both.sort(key=lambda pair: derive(seed, pair[1].question.question_id))
    kinds = [[False, True], [True, False], [False, False], [True, True]]
    return interleaved([[pair for pair in both if [shown.right for shown in pair] == kind] for kind in kinds])[:count]


def interleaved(rows: Sequence[Sequence[T]]) -> list[T]:
    """The first of every row, then the second of every row, and so on."""
    longest = max(map(len, rows), default=0)
    return [row[place] for place in range(longest) for row in rows if place < len(row)]
