"""The collapse monitor: signs of the Echo Trap (RAGEN, arXiv 2504.20073) in the metrics of a run's iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal

from agent_r1.params.train import MonitorParams

DISTANCE = "distance"  # an iteration's mean return, from the best return of the history
ROUNDING = 1e-9  # a share of the first distance that is none
# Remedies
SPREAD = "train.rollout.samples, train.credit.filter.refill, easier questions"
BALANCE = "fewer such questions, or as many with other answers"
SHORTER = "a lower train.update.learning_rate"

Iteration = Mapping[str, float]  # its metrics


@dataclass(frozen=True, slots=True)
class Sign:
    """One way a run can go wrong."""

    metric: str
    side: Literal["above", "below"]  # of its limit that is the bad one
    standard: Callable[..., Iteration]  # (the first iterations, key=) -> the one to be held against
    limit: Callable[[str, Iteration, Iteration, float], float]  # of standard, the one judged, threshold
    remedy: str
    among: Literal["first", "healthy", "all"] = "first"  # iterations before, of which one is the standard

    def chosen(self, past: Sequence[Iteration], first: int) -> Iteration:
        """The standard among some iterations."""
        among = {"first": past[:first], "healthy": past[-first:], "all": past}[self.among]
        return self.standard(among, key=itemgetter(self.metric))

    def beyond(self, judged: Iteration, limit: float) -> bool:
        """Whether an iteration is on the bad side of a limit."""
        return judged[self.metric] > limit if self.side == "above" else judged[self.metric] < limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """A sign that was shown often enough in a row."""

    sign: str  # a key of SIGNS and of train.monitor.thresholds
    metric: str
    value: float  # in the last iteration
    standard: float  # the metric in the iteration that it is held against
    limit: float  # the value at which the sign begins, from standard and threshold

    def __str__(self) -> str:
        side = "above" if self.value > self.limit else "below"
        limit = f"{side} {self.limit:.4g}, and was {self.standard:.4g}"
        return f"{self.sign}: {self.metric} {self.value:.4g} is {limit} (what helps: {SIGNS[self.sign].remedy})"


def alarms(
    history: Sequence[Iteration], monitor: MonitorParams, *, samples: int, streak: int | None = None
) -> list[Alarm]:
    """The signs that each of the last `streak` iterations shows, by default `monitor.patience` of them.

    A sign is judged where the last iteration has its metric (a critic's warm-up has no gradient of the policy), over
    the iterations that have it, as soon as there is one before the last `streak`. With one of the `samples` per
    question no group has a std, and the std of the whole batch stands for it.
    """
    best = max(iteration["reward/max"] for iteration in history)
    past = [{**iteration, DISTANCE: best - iteration["reward/total"]} for iteration in history]
    thresholds = monitor.thresholds.model_dump()
    whole_batch = replace(SIGNS["reward_std_fall"], metric="reward/std")
    signs = SIGNS if samples > 1 else SIGNS | {"reward_std_fall": whole_batch}
    candidates = [
        _alarm(name, sign, past, thresholds[name], first=monitor.first_iterations, streak=streak or monitor.patience)
        for name, sign in signs.items()
        if thresholds[name] and sign.metric in past[-1]
    ]
    return [alarm for alarm in candidates if alarm]


def is_clean(history: Sequence[Iteration], monitor: MonitorParams, *, samples: int) -> bool:
    """Whether no sign has even begun: none is shown by the last iteration, or by any last few up to `patience`."""
    streaks = range(1, monitor.patience + 1)
    return not any(alarms(history, monitor, samples=samples, streak=streak) for streak in streaks)


def _alarm(
    name: str, sign: Sign, past: Sequence[Iteration], threshold: float, *, first: int, streak: int
) -> Alarm | None:
    judged = [iteration for iteration in past if sign.metric in iteration]
    baseline = judged[:-streak]
    last = judged[-streak:]
    if not baseline:
        return None
    if sign.among == "healthy":
        baseline = _healthy(sign, baseline, threshold, first)
    standard = sign.chosen(baseline, first)
    limits = [sign.limit(sign.metric, standard, iteration, threshold) for iteration in last]
    if not all(map(sign.beyond, last, limits)):
        return None
    value = last[-1][sign.metric]
    return Alarm(sign=name, metric=sign.metric, value=value, standard=standard[sign.metric], limit=limits[-1])


def _healthy(sign: Sign, past: Sequence[Iteration], threshold: float, first: int) -> list[Iteration]:
    """The iterations that did not show the sign, held against those before them that did not."""
    healthy = [past[0]]
    for iteration in past[1:]:
        if not sign.beyond(iteration, sign.limit(sign.metric, sign.chosen(healthy, first), iteration, threshold)):
            healthy.append(iteration)
    return healthy


def _lower_median(among: Sequence[Iteration], *, key: Callable[[Iteration], float]) -> Iteration:
    return sorted(among, key=key)[(len(among) - 1) // 2]


def _multiple(metric: str, standard: Iteration, _: Iteration, threshold: float) -> float:
    return threshold * standard[metric]


def _absolute(metric: str, standard: Iteration, _: Iteration, threshold: float) -> float:
    return threshold


def _part_of_the_way_to_one(metric: str, standard: Iteration, _: Iteration, threshold: float) -> float:
    return standard[metric] + threshold * (1 - standard[metric])


def _multiple_unless_solved(metric: str, standard: Iteration, judged: Iteration, threshold: float) -> float:
    """`_multiple`, lowered in proportion as the mean return comes closer to the best return.

    A policy that solves its questions has ever more equal returns too. Where a return is either 0 or b, the std is a
    concave function of the distance d between b and the mean, and 0 at d = 0: on the way from d_0 to b it stays above
    d / d_0 times its first value, so that success alone is never below a threshold of at most 1.
    """
    if judged[DISTANCE] >= standard[DISTANCE] or not standard[DISTANCE]:  # rounding may bring a mean above the best
        return threshold * standard[metric]
    share = judged[DISTANCE] / standard[DISTANCE]
    return threshold * standard[metric] * (share if share > ROUNDING else 0.0)


# The standard is the healthiest of the first iterations, so that a run that collapses at once is noticed; for entropy,
# which can err on both sides, it is their median. Entropy is judged by the surprisal of all sampled tokens: groups of
# equal returns have no gradient and go through no other pass, and their share changes as a run learns. In one iteration
# it errs by a tenth, against thresholds of a tenth and of four times. A jump stands out from the last iterations that
# had none; twice as much is seen in healthy runs. An update that moves the policy too far does so in any run. Gradient
# norms grow in healthy runs: a spike stands out from all iterations before it.
SIGNS = {
    "reward_std_fall": Sign("reward/std_in_groups", "below", max, _multiple_unless_solved, SPREAD),
    "entropy_fall": Sign("rollout/surprisal", "below", _lower_median, _multiple, SHORTER),
    "entropy_rise": Sign("rollout/surprisal", "above", _lower_median, _multiple, SHORTER),
    "surprisal_jump": Sign("rollout/surprisal", "above", _lower_median, _multiple, SHORTER, among="healthy"),
    "long_step": Sign("policy/kl_step", "above", min, _absolute, SHORTER),
    "grad_norm_spike": Sign("policy/grad_norm", "above", _lower_median, _multiple, SHORTER, among="all"),
    "valid_call_fall": Sign("rollout/valid_call_share", "below", max, _multiple, SHORTER),
    "answer_repetition": Sign("rollout/answer_repetition", "above", min, _part_of_the_way_to_one, BALANCE),
    "thought_repetition": Sign("rollout/thought_repetition", "above", min, _part_of_the_way_to_one, SHORTER),
}
