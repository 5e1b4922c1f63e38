"""The health of a training, after the fact: its kinds of failure by cost, and rewards that rose without success."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from textwrap import shorten
from typing import NamedTuple

import numpy as np

from agent_r1.credit.rewards import repeat_call, step_rewards
from agent_r1.files import read_metrics
from agent_r1.inspection.stored import StoredRun
from agent_r1.params.credit import CreditParams
from agent_r1.records import CallStatus, Decode, Floats, Outcome, Source, Trajectory
from agent_r1.training.findings import TEACH
from agent_r1.training.questions import VALIDATED

NAMED_SHARE = 0.2  # of episodes: a kind is named from here on
NAMED_LOSS = 0.1  # of success: so it is from here on
RISING = 2.58  # z of the test of Mann (1945) and Kendall: chance shows it in one of 200 windows without a trend
SMALLEST_RISE = 0.1  # of a reward, in standard deviations of the return
FEWEST = 3  # validations that say how success goes
TAUGHT = "a tool's description, warm_start.conversations that call it well"
GAMING = "a smaller weight in credit.rewards"
REMEDIES = {  # of other kinds than gamed rewards and failed calls
    "aborted": "the server or tool behind env, its timeouts",
    "turn limit": "env.max_steps",
    "token limit": "env.max_tokens, env.max_result_characters, env.top_k",
    "malformed action": TEACH,
    "repeated call": "rewards.repeat_call",
    "unsupported answer": "rewards.grounded",
}
GAMED = "gamed reward: "  # the first words of a kind
LONGEST = 60  # characters of a failed call's kind


class FailureKind(NamedTuple):
    """A kind of failure in a run."""

    kind: str
    episodes: list[str]  # ids of trajectories, in time
    share: float  # of all episodes
    at_end: float  # of the last iteration's
    reward_lost: float  # per episode of the run; NaN without episodes to compare with
    success_lost: float
    gamed: str  # how the reward rose; "" for another kind
    named: bool  # or merely counted

    @property
    def remedy(self) -> str:
        """What helps."""
        return GAMING if self.gamed else REMEDIES.get(self.kind, TAUGHT)


def audit(stored: StoredRun, params: CreditParams, max_tokens: int) -> list[FailureKind]:
    """The kinds of failure in the kept iterations: gamed rewards, other named kinds, the rest; each by reward lost."""
    rises = gamed_rewards(read_metrics(stored.folder)[: stored.progress.iterations], params.rewards.weights)
    episodes = AuditedEpisodes()
    for iteration in stored.kept:
        returns = {credit.trajectory_id: credit.return_ for credit in stored.credits(iteration)}
        for trajectory in stored.trajectories(iteration):
            return_ = returns.get(trajectory.trajectory_id)
            payments: list[float] = []
            if rises or return_ is None:
                totals, parts = step_rewards(trajectory, params, max_tokens)
                payments = [params.rewards.weights[part] * float(parts[part].sum()) for part in rises]
                return_ = float(sum(totals)) if return_ is None else return_
            episodes.add(trajectory, return_, payments, stored.decode, last=iteration == stored.kept[-1])
    return sorted(
        episodes.by_kind(rises), key=lambda kind: (not kind.gamed, not kind.named, -np.nan_to_num(kind.reward_lost))
    )


class AuditedEpisodes:
    """The episodes of an audit, each with its place in these lists."""

    def __init__(self) -> None:
        self.kinds = defaultdict[str, list[int]](list)  # kind of failure -> the places of the episodes that have it
        self._names = list[str]()
        self._last = list[bool]()
        self._values = list[list[float]]()

    def add(
        self, trajectory: Trajectory, return_: float, payments: Sequence[float], decode: Decode, *, last: bool
    ) -> None:
        """Takes an episode, which may be of the `last` iteration."""
        for kind in {*failures(trajectory, decode)}:
            self.kinds[kind].append(len(self._names))
        self._names.append(trajectory.trajectory_id)
        self._last.append(last)
        values = [return_, trajectory.success, *payments]
        self._values.append([math.nan] * len(values) if trajectory.aborted else values)

    def by_kind(self, rises: Mapping[str, str]) -> list[FailureKind]:
        """All kinds, once all episodes are there; a gamed part's are those that it paid more than the mean."""
        for part, payment in zip(rises, self.earned.T[2:], strict=True):
            self.kinds[GAMED + part] = np.flatnonzero(payment > np.nanmean(payment)).tolist()
        return [self.of_kind(name, rises.get(name.removeprefix(GAMED), "")) for name in self.kinds]

    @cached_property
    def earned(self) -> Floats:
        """[E, 2 + gamed parts] the return, the success and what each gamed part paid; no numbers if cut short."""
        return np.array(self._values, np.float64)

    def of_kind(self, kind: str, gamed: str) -> FailureKind:
        """What a kind of failure costs: the other episodes' means less its own, by its share."""
        earned = self.earned
        having = np.isin(np.arange(len(self._names)), self.kinds[kind])
        lacking = earned[np.isfinite(earned[:, 0]) & ~having]
        means = lacking.mean(axis=0) if len(lacking) else math.nan
        share = float(having.mean())
        reward, success = (share * (means - earned[having].mean(axis=0)))[:2].tolist()
        return FailureKind(
            kind=kind,
            episodes=[self._names[place] for place in self.kinds[kind]],
            share=share,
            at_end=float(having[np.array(self._last)].mean()),
            reward_lost=reward,
            success_lost=success,
            gamed=gamed,
            named=bool(gamed) or share >= NAMED_SHARE or success >= NAMED_LOSS,
        )


def failures(trajectory: Trajectory, decode: Decode) -> Iterator[str]:
    """The kinds of failure of an episode. One that the world cut short has that kind alone."""
    if trajectory.outcome in (Outcome.ABORTED, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT):
        yield trajectory.outcome.replace("_", " ")
    if trajectory.aborted:
        return
    if repeat_call(trajectory).any():
        yield "repeated call"
    for step, reply in zip(trajectory.steps, trajectory.replies, strict=True):
        if step.rewards.get("grounded") == 0:
            yield "unsupported answer"
        failed = [call for call in step.calls if call.status is not CallStatus.OK]
        text = decode(trajectory.ids(reply, Source.OBSERVATION)).partition("Error: ")[2] if failed else ""
        message = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "...", text)  # without quotations and numbers
        for call in failed:
            tool = "" if call.status is CallStatus.UNKNOWN_TOOL else f"{call.tool} "
            label = shorten(f"{tool}{call.status}: {message}".replace("_", " "), LONGEST, placeholder=" ...")
            yield "malformed action" if call.status is CallStatus.MALFORMED else label


def gamed_rewards(metrics: Sequence[Mapping[str, float]], weights: Mapping[str, float]) -> dict[str, str]:
    """The parts of the reward that rise while success does not, in the run or its second half, with words on how.

    A part rises if the test of Mann and Kendall says so of its means by iteration, whose range is SMALLEST_RISE at
    least. Success does not if no more pairs of its measurements rise than fall. It is that of dev questions, or where
    these iterations have fewer than FEWEST validations, that of the training questions.
    """
    rises: dict[str, str] = {}
    smallest = SMALLEST_RISE * np.mean([line["reward/std"] for line in metrics] or [0.0])
    for window in (metrics, metrics[len(metrics) // 2 :]):
        split = "dev"
        success = [line[VALIDATED] for line in window if VALIDATED in line]
        if len(success) < FEWEST:
            split = "training"
            success = [line["rollout/success"] for line in window]
        for part, weight in weights.items():
            payments = [weight * line.get(f"reward/{part}", 0.0) for line in window]
            if _trend(payments) > RISING and _trend(success) <= 0 and np.ptp(payments) >= smallest:
                rise = f"{part} goes from {payments[0]:.3f} to {payments[-1]:.3f} in {len(window)} iterations"
                beside = f"success on {split} questions from {success[0]:.3f} to {success[-1]:.3f}"
                rises.setdefault(part, f"{rise}, {beside}")
    return rises


def _trend(values: Sequence[float]) -> float:
    """The z of Mann and Kendall's test: above 0 if more pairs of values rise than fall."""
    count = len(values)
    rising = sum(np.sign(np.subtract(values[place:], value)).sum() for place, value in enumerate(values))
    return float(rising / max(1.0, count * (count - 1) * (2 * count + 5) / 18) ** 0.5)
