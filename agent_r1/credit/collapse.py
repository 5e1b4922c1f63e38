"""The collapse monitor: signs of the Echo Trap (RAGEN, arXiv 2504.20073) in the metrics of a run's iterations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agent_r1.answers import normalize
from agent_r1.params import MonitorParams
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


Row = Mapping[str, float]  # the metrics of one iteration

DISTANCE = "distance"  # a row's mean return, from the best return of the history
ROUNDING = 1e-9  # a share of the first distance that is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """One way a run can go wrong."""

    metric: str
    rises: bool  # whether the high values are the bad ones
    reference: Callable[[str, Sequence[Row], int], Row]  # of the metric, the rows before, and how many are the first
    limit: Callable[[str, Row, Row, float], float]  # of the metric, the reference, the row judged and the threshold


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """A sign that was shown often enough in a row."""

    sign: str  # a key of SIGNS and of train.monitor.thresholds
    metric: str
    value: float  # in the last iteration
    reference: float  # the metric in the iteration that it is held against
    limit: float  # what the threshold makes of the reference: the value at which the sign begins

    def __str__(self) -> str:
        side = "above" if self.value > self.limit else "below"
        return f"{self.sign}: {self.metric} {self.value:.4g} is {side} {self.limit:.4g}, and was {self.reference:.4g}"


def alarms(history: Sequence[Row], monitor: MonitorParams, *, samples: int) -> list[Alarm]:
    """The signs that each of the last `monitor.patience` iterations shows.

    A sign is judged where the last iteration has its metric (a critic's warm-up has no gradient of the policy), over
    the iterations that have it, as soon as there is one before the last `patience`.

    Args:
        history: the metrics of all iterations so far, the last one included.
        samples: episodes per question. With 1 no group has a std, and that of the whole batch stands for it.
    """
    return _alarms(history, monitor, samples=samples, streak=monitor.patience)


def is_clean(history: Sequence[Row], monitor: MonitorParams, *, samples: int) -> bool:
    """Whether no sign has even begun: none is shown by the last iteration, or by any last few up to `patience`."""
    streaks = range(1, monitor.patience + 1)
    return not any(_alarms(history, monitor, samples=samples, streak=streak) for streak in streaks)


def _highest_of_first(metric: str, before: Sequence[Row], first: int) -> Row:
    return max(before[:first], key=lambda row: row[metric])


def _lowest_of_first(metric: str, before: Sequence[Row], first: int) -> Row:
    return min(before[:first], key=lambda row: row[metric])


def _median_of_first(metric: str, before: Sequence[Row], first: int) -> Row:
    return _median(metric, before[:first], first)


def _median(metric: str, before: Sequence[Row], _: int) -> Row:
    """The lower one of two."""
    return sorted(before, key=lambda row: row[metric])[(len(before) - 1) // 2]


def _multiple(metric: str, reference: Row, _: Row, threshold: float) -> float:
    return threshold * reference[metric]


def _part_of_the_way_to_one(metric: str, reference: Row, _: Row, threshold: float) -> float:
    return reference[metric] + threshold * (1 - reference[metric])


def _multiple_unless_solved(metric: str, reference: Row, row: Row, threshold: float) -> float:
    """`_multiple`, lowered in proportion as the mean return comes closer to the best return.

    A policy that solves its questions has ever more equal returns too. Where a return is either 0 or b, the std is a
    concave function of the distance d between b and the mean, and 0 at d = 0: on the way from d_0 to b it stays above
    d / d_0 times what it was, so that success alone is never below a threshold of at most 1.
    """
    if row[DISTANCE] >= reference[DISTANCE]:
        return threshold * reference[metric]
    share = row[DISTANCE] / reference[DISTANCE]
    return threshold * reference[metric] * (share if share > ROUNDING else 0.0)


# The healthiest of the first iterations is the reference, so that a run that collapses at once is held against what it
# was; entropy can err on both sides, so the median of them is. Gradient norms grow in healthy runs: a spike stands out
# from all that came before.
SIGNS = {
    "reward_std_fall": Sign(
        metric="reward/std_in_groups", rises=False, reference=_highest_of_first, limit=_multiple_unless_solved
    ),
    "entropy_fall": Sign(metric="policy/entropy", rises=False, reference=_median_of_first, limit=_multiple),
    "entropy_rise": Sign(metric="policy/entropy", rises=True, reference=_median_of_first, limit=_multiple),
    "grad_norm_spike": Sign(metric="policy/grad_norm", rises=True, reference=_median, limit=_multiple),
    "valid_call_fall": Sign(
        metric="rollout/valid_call_share", rises=False, reference=_highest_of_first, limit=_multiple
    ),
    "answer_repetition": Sign(
        metric="rollout/answer_repetition", rises=True, reference=_lowest_of_first, limit=_part_of_the_way_to_one
    ),
    "thought_repetition": Sign(
        metric="rollout/thought_repetition", rises=True, reference=_lowest_of_first, limit=_part_of_the_way_to_one
    ),
}


def _alarms(history: Sequence[Row], monitor: MonitorParams, *, samples: int, streak: int) -> list[Alarm]:
    best = max(row["reward/max"] for row in history)
    rows = [{**row, DISTANCE: best - row["reward/total"]} for row in history]
    thresholds = monitor.thresholds.model_dump()
    found = [
        _alarm(name, sign, rows, thresholds[name], first=monitor.first_iterations, streak=streak)
        for name, sign in _signs(samples).items()
        if thresholds[name] and sign.metric in rows[-1]
    ]
    return [alarm for alarm in found if alarm]


def _signs(samples: int) -> dict[str, Sign]:
    if samples > 1:
        return SIGNS
    return {**SIGNS, "reward_std_fall": replace(SIGNS["reward_std_fall"], metric="reward/std")}


def _alarm(name: str, sign: Sign, rows: Sequence[Row], threshold: float, *, first: int, streak: int) -> Alarm | None:
    judged = [row for row in rows if sign.metric in row]
    before, last = judged[:-streak], judged[-streak:]
    if not before:
        return None
    reference = sign.reference(sign.metric, before, first)
    values = [row[sign.metric] for row in last]
    limits = [sign.limit(sign.metric, reference, row, threshold) for row in last]
    beyond = (value > limit if sign.rises else value < limit for value, limit in zip(values, limits, strict=True))
    if not all(beyond):
        return None
    return Alarm(sign=name, metric=sign.metric, value=values[-1], reference=reference[sign.metric], limit=limits[-1])
