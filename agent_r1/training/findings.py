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
    say little of it). And nearly all answers, or those to yes/no questions, are one word that is often wrong. Episodes
    that the world cut short, or without an action, do not count.
    """
    episodes = [each for each in trajectories if each.counts]
    if not episodes:
        return
    golds = {question.question_id: normalize("".join(question.answers[:1])) for question in questions}
    yield from _of_actions(episodes, returns, golds, chat, lost, tools=tools)
    answers = [(normalize(each.answer), golds[each.question_id]) for each in episodes if each.answer]
    yield from _habits("", answers)
    yield from _habits(" to yes/no questions", [pair for pair in answers if pair[1] in ("yes", "no")])


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
    actions = sum(len(each.steps) for each in episodes)
    prose = [text for each in episodes for text in _prose(each, chat)]
    equal, groups, spread = _spread(episodes, returns)
    ends = Counter(each.outcome for each in episodes)
    owed, fails = all(golds[each.question_id] for each in episodes), fmean(each.success for each in episodes) < 0.5
    calls = {call.status for each in episodes for step in each.steps for call in step.calls}
    if 2 * len(prose) >= actions:
        share = f"{len(prose)} of {actions} actions are neither a call nor an answer"
        quoted = repr(shorten(prose[0], LONGEST, placeholder=" ..."))
        yield f"{share}, the first {quoted}, and {spread}; what helps, in this order: {TEACH}"
    elif ends.keys() <= UNANSWERED and owed:
        limits = ", ".join(f"{end} {count}" for end, count in ends.items())
        yield f"no episode comes to an answer ({limits}), and {spread}; what helps: {LIMITS}"
    elif tools and owed and fails and calls <= {CallStatus.MALFORMED}:
        yield f"no episode calls a tool, so that no call is learned, and {spread}; what helps, in this order: {TEACH}"
    elif fails and equal >= lost * groups:
        yield f"{spread}, and tell no action from another; what helps: {SPREAD}"


def _spread(episodes: Sequence[Trajectory], returns: Mapping[str, float]) -> tuple[int, int, str]:
    """In how many groups all returns are equal, how many groups there are, and that in words."""
    grouped = len({each.group for each in episodes}) < len(episodes)
    values = {(each.group * grouped, round(returns.get(each.trajectory_id, each.success), 9)) for each in episodes}
    counts = [*Counter(group for group, _ in values).values()]  # different returns of each group
    equal = counts.count(1)
    if grouped:
        return equal, len(counts), f"in {equal} of {len(counts)} groups all returns are equal"
    return equal, len(counts), "all returns are equal" if equal else "not all returns are equal"


def _habits(kind: str, answers: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The one word that nearly all answers are, each with its gold answer, if it is often wrong."""
    for word, count in Counter(answer for answer, _ in answers).most_common(1):
        right = answers.count((word, word))
        several = len({gold for _, gold in answers}) > 1
        if several and count >= max(FEWEST, HABIT * len(answers)) and right <= RIGHT * count:
            share = f"{count} of {len(answers)} answers{kind} are {word!r}, {right} of them right"
            yield f"{share}; what helps: {BALANCE}"


def strays(history: Sequence[Mapping[str, float]], success: str) -> Iterator[str]:
    """The reason that a run's metrics show, every `SPAN` iterations; `success` is the environment's word for it.

    The later half of the iterations earns more than the earlier one, by three standard errors, and succeeds no more
    often, and in less than half of its episodes.
    """
    half = len(history) // 2
    if not history or len(history) % SPAN:
        return
    returns = [each["reward/total"] for each in history]
    rates = [each["rollout/success"] for each in history]
    before, after = fmean(returns[:half]), fmean(returns[half:])
    was, became = fmean(rates[:half]), fmean(rates[half:])
    noise = math.sqrt((variance(returns[:half]) + variance(returns[half:])) / half)
    if after - before > 3 * noise and became <= was and became < 0.5:
        rose = f"the return rose from {before:.3f} to {after:.3f} in {len(history)} iterations"
        yield f"{rose}, and {success} did not, from {was:.3f} to {became:.3f}; what helps: {REWARDS}"


def _prose(trajectory: Trajectory, chat: Chat) -> Iterator[str]:
    """The texts of the actions that are neither a call nor an answer."""
    malformed = (step for step in trajectory.steps if step.call_status is CallStatus.MALFORMED)
    spans = (slice(step.action_start, step.action_stop) for step in malformed)
    return filter(is_prose, (chat.decode(trajectory.ids(span, Source.ACTION)) for span in spans))
