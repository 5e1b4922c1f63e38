"""Reasons why a policy learns little or nothing from its episodes, each a sentence with what helps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, variance
from textwrap import shorten

from agent_r1.answers import normalize
from agent_r1.credit.collapse import BALANCE, SPREAD
from agent_r1.envs.base import is_prose
from agent_r1.records import CallStatus, Outcome, Question, Source, Trajectory
from agent_r1.rollout.chat import Chat

TEACH = "env.examples, env.instructions, warm_start.fine_tune, warm_start.conversations, another model"
LIMITS = f"env.max_action_tokens, env.max_tokens, env.max_steps; or {TEACH}"
REWARDS = "a look at what earns it (agent-r1 try), the answers of the data, train.credit.rewards"
UNANSWERED = {Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.MALFORMED}
HABIT = 0.9  # of the answers: so many alike are a habit, if at most RIGHT of them are right
RIGHT = 0.75
FEWEST = 8  # answers that show one
LONGEST = 80  # characters of an action that is quoted
SPAN = 10  # iterations: after so many, and so many more, a history is looked at


def findings(
    trajectories: Iterable[Trajectory],
    returns: Mapping[str, float],
    questions: Iterable[Question],
    chat: Chat,
    lost: float = math.inf,
    *,
    tools: bool = False,
) -> Iterator[str]:
    """The reasons that trajectories show; `returns` are by trajectory_id, and success stands for one that is missing.

    At most one of these: half of the actions or more are neither a call nor an answer; every episode ends in a fault or
    at a limit, where questions have answers; most have no success, and none calls anything, where the policy has
    `tools`, or the share `lost` of the groups or more have equal returns (single samples are one group; greedy answers
    say little of it). And nearly all answers, or those to yes/no questions, are one word that is often wrong. And all
    episodes are successes, the one that its world paid least too. Episodes that the world cut short, or without an
    action, do not count.
    """
    episodes = [trajectory for trajectory in trajectories if trajectory.counts]
    if not episodes:
        return
    golds = {question.question_id: normalize("".join(question.answers[:1])) for question in questions}
    yield from _of_actions(episodes, returns, golds, chat, lost, tools=tools)
    answers = [(normalize(episode.answer), golds[episode.question_id]) for episode in episodes if episode.answer]
    yield from _habits("", answers)
    yield from _habits(" to yes/no questions", [pair for pair in answers if pair[1] in ("yes", "no")])
    yield from _easy(episodes)


def _of_actions(
    episodes: Sequence[Trajectory],
    returns: Mapping[str, float],
    golds: Mapping[str, str],
    chat: Chat,
    lost: float,
    *,
    tools: bool,
) -> Iterator[str]:
    """The one reason that actions and returns show, if there is one."""
    actions = sum(len(episode.steps) for episode in episodes)
    prose = [text for episode in episodes for text in _prose(episode, chat)]
    is_lost, spread = _spread(episodes, returns, lost)
    if 2 * len(prose) >= actions:
        share = f"{len(prose)} of {actions} actions are neither a call nor an answer"
        excerpt = shorten(prose[0], LONGEST, placeholder=" ...")
        yield f"{share}, the first {excerpt!r}, and {spread}; what helps, in this order: {TEACH}"
    else:
        yield from _of_ends(episodes, golds, spread, is_lost, tools=tools)


def _of_ends(
    episodes: Sequence[Trajectory], golds: Mapping[str, str], spread: str, is_lost: bool, *, tools: bool
) -> Iterator[str]:
    """The one reason that outcomes and returns show, if there is one."""
    ends = Counter(episode.outcome for episode in episodes)
    asks = all(golds[episode.question_id] for episode in episodes)
    fails = fmean(episode.success for episode in episodes) < 0.5
    statuses = {call.status for episode in episodes for step in episode.steps for call in step.calls}
    if ends.keys() <= UNANSWERED and asks:
        limits = ", ".join(f"{end} {count}" for end, count in ends.items())
        yield f"no episode comes to an answer ({limits}), and {spread}; what helps: {LIMITS}"
    elif tools and asks and fails and statuses <= {CallStatus.MALFORMED}:
        problem = "no episode calls a tool, so that no call is learned"
        yield f"{problem}, and {spread}; what helps, in this order: {TEACH}"
    elif fails and is_lost:
        yield f"{spread}, and tell no action from another; what helps: {SPREAD}"


def _spread(episodes: Sequence[Trajectory], returns: Mapping[str, float], lost: float) -> tuple[bool, str]:
    """Whether all returns are equal in the share `lost` of the groups or more, and in words in how many they are."""
    grouped = len({episode.group for episode in episodes}) < len(episodes)
    values = {
        (episode.group * grouped, round(returns.get(episode.trajectory_id, episode.success), 9)) for episode in episodes
    }
    counts = [*Counter(group for group, _ in values).values()]  # different returns of each group
    equal = counts.count(1)
    if grouped:
        return equal >= lost * len(counts), f"in {equal} of {len(counts)} groups all returns are equal"
    return equal >= lost * len(counts), "all returns are equal" if equal else "not all returns are equal"


def _habits(kind: str, answers: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The one word that nearly all answers are, each with its gold answer, if it is often wrong."""
    for word, count in Counter(answer for answer, _ in answers).most_common(1):
        right = answers.count((word, word))
        several = len({gold for _, gold in answers}) > 1
        if several and count >= max(FEWEST, HABIT * len(answers)) and right <= RIGHT * count:
            share = f"{count} of {len(answers)} answers{kind} are {word!r}, {right} of them right"
            yield f"{share}; what helps: {BALANCE}"


def _easy(episodes: Sequence[Trajectory]) -> Iterator[str]:
    """That all episodes are successes, where a world pays less than 1 for one of them."""
    paid = [
        sum(step.rewards.get("env", 0.0) for step in episode.steps)
        for episode in episodes
        if episode.success and "env" in episode.steps[-1].rewards
    ]
    if len(paid) == len(episodes) >= FEWEST and min(paid) < 1:
        share = f"all {len(paid)} episodes are successes, and the world paid {min(paid):.4g} for one of them"
        yield f"{share}; if it pays as much for a lost game, let success ask for more: success_above, success"


def strays(history: Sequence[Mapping[str, float]], success: str) -> Iterator[str]:
    """The reason that a run's metrics show, every `SPAN` iterations; `success` is the environment's word for it.

    The later half of the iterations earns more than the earlier one, by three standard errors, and succeeds no more
    often, and in less than half of its episodes.
    """
    half = len(history) // 2
    if not history or len(history) % SPAN:
        return
    returns = [metrics["reward/total"] for metrics in history]
    rates = [metrics["rollout/success"] for metrics in history]
    early_return = fmean(returns[:half])
    late_return = fmean(returns[half:])
    early_rate = fmean(rates[:half])
    late_rate = fmean(rates[half:])
    noise = math.sqrt((variance(returns[:half]) + variance(returns[half:])) / half)
    if late_return - early_return > 3 * noise and late_rate <= early_rate and late_rate < 0.5:
        rose = f"the return rose from {early_return:.3f} to {late_return:.3f} in {len(history)} iterations"
        yield f"{rose}, and {success} did not, from {early_rate:.3f} to {late_rate:.3f}; what helps: {REWARDS}"


def _prose(trajectory: Trajectory, chat: Chat) -> Iterator[str]:
    """The texts of the actions that are neither a call nor an answer."""
    malformed = (step for step in trajectory.steps if step.call_status is CallStatus.MALFORMED)
    spans = (slice(step.action_start, step.action_stop) for step in malformed)
    return filter(is_prose, (chat.decode(trajectory.ids(span, Source.ACTION)) for span in spans))
