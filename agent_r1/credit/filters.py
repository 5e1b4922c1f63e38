"""Which trajectories are trained on.

`select` is the filter of StarPO-S (RAGEN, arXiv 2504.20073, §4.2), the groups whose returns differ most: what differs
between attempts at one question is what the policy has yet to learn; where all attempts earn the same, a return says
nothing. `left_out` takes single trajectories out of the policy loss alone. Legend for shapes: B = trajectories of an
iteration, G = its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit.batch import Floats, Mask, group_statistics
from agent_r1.params.credit import FilterParams, LeftOutParams
from agent_r1.records import CallStatus, Trajectory

EQUAL = 1e-9  # a std of returns that differ by rounding alone is below; a sum of weights depends on its order
ROUNDING = 1e-9  # relative, of sums and products of shares


def select(
    returns: Floats, groups: NDArray[np.int64], params: FilterParams, questions: int | None = None
) -> tuple[Mask, float, float]:
    """[B] which trajectories are kept; the share of groups that are; the smallest in-group std kept, 0 where none is.

    Groups are kept whole by the sample std of their raw returns [B], 0 in a group of one; `groups` is [B] too. A share
    of groups is one of so many `questions`: of all there are unless a refill has added some.
    """
    stds, group = _group_stds(returns, groups)
    kept = FILTERS[params.kind](stds, params.share, questions or len(stds))
    return kept[group], float(kept.mean()), float(stds[kept].min()) if kept.any() else 0.0


def differing(returns: Floats, groups: NDArray[np.int64]) -> int:
    """The number of groups whose returns [B] are not all equal."""
    return int((_group_stds(returns, groups)[0] > EQUAL).sum())


def left_out(trajectories: Sequence[Trajectory], params: LeftOutParams) -> Mask:
    """[B] the trajectories that no policy loss runs over; statistics and critic keep them.

    Source: truncated ones: overlong filtering, DAPO (arXiv 2503.14476), §3.4; those with a void step, whose action is
    neither a well-formed call nor an answer: SimpleTIR (arXiv 2509.02479).
    """
    truncated = [params.truncated and each.truncated for each in trajectories]
    void = [params.void_step and _has_void_step(each) for each in trajectories]
    return np.logical_or(truncated, void)


def _has_void_step(trajectory: Trajectory) -> bool:
    return any(step.call_status is CallStatus.MALFORMED for step in trajectory.steps)


def _group_stds(returns: Floats, groups: NDArray[np.int64]) -> tuple[Floats, NDArray[np.intp]]:
    """[G] the sample std of each group's returns [B], and [B] which of them is the trajectory's."""
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    return group_statistics(returns, groups)[1][first], group


def keep_all(stds: Floats, share: float, questions: int) -> Mask:
    """[G] no filter: groups without differences are kept too."""
    return np.ones(len(stds), np.bool_)


def top_p(stds: Floats, share: float, questions: int) -> Mask:
    """[G] as few groups as cover `share` of the stds' sum, those of largest std first; none of std 0.

    The share is taken of the stds themselves ("linear"), not of their softmax.
    """
    ranked, back = _rank(stds)
    covered_before = ranked.cumsum() - ranked
    kept: Mask = (covered_before < (share - ROUNDING) * ranked.sum()) & (ranked > EQUAL)
    return kept[back]


def top_fraction(stds: Floats, share: float, questions: int) -> Mask:
    """[G] the `share` of `questions` groups (rounded down, at least one) with the largest std; none of std 0."""
    ranked, back = _rank(stds)
    most = max(int(share * questions + ROUNDING), 1)
    kept: Mask = (np.arange(len(stds)) < most) & (ranked > EQUAL)
    return kept[back]


FILTERS: dict[str, Callable[[Floats, float, int], Mask]]
FILTERS = {"none": keep_all, "top_p": top_p, "top_fraction": top_fraction}


def _rank(stds: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """[G] the stds from the largest, among equals the earlier group first, and [G] each group's place among them."""
    order = np.argsort(-stds, kind="stable")
    return stds[order], np.argsort(order)
