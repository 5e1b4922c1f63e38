"""Reasons why a policy learns little or nothing from its episodes, each a sentence with what helps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean
from textwrap import shorten

from agent_r1.answers import normalize
from agent_r1.credit.collapse import BALANCE, SPREAD
from agent_r1.envs.base import is_prose
from agent_r1.records import CallStatus, Outcome, Question, Source, Trajectory
from agent_r1.rollout.chat import Chat

TEACH = "env.examples, env.instructions, warm_start.fine_tune, warm_start.conversations, another model"
LIMITS = f"env.max_action_tokens, env.max_tokens, env.max_steps; or {TEACH}"
UNANSWERED = {Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.MALFORMED}
HABIT = 0.9  # of the answers: so many alike are a habit, if at most RIGHT of them are right
RIGHT = 0.75
FEWEST = 8  # answers that show one
LONGEST = 80  # characters of an action that is quoted


def findings(
    trajectories: Iterable[Trajectory],
    returns: Mapping[str, float],
    questions: Iterable[Question],
    chat: Chat,
    lost: float = math.inf,
) -> Iterator[str]:
    """The reasons that trajectories show; `returns` are by trajectory_id, and success stands for one that is missing.

    At most one of these: half of the actions or more are neither a call nor an answer; every episode ends in a fault or
    at a limit, where questions have answers; the share `lost` of the groups or more have equal returns, and most
    episodes no success (single samples are one group; greedy answers say little of it). And nearly all answers, or
    those to yes/no questions, are one word that is often wrong. Episodes that the world cut short, or without an
    action, do not count.
    """
    episodes = [each for each in trajectories if each.counts]
    if not episodes:
        return
    actions = sum(len(each.steps) for each in episodes)
    prose = [text for each in episodes for text in _prose(each, chat)]
    grouped = len({each.group for each in episodes}) < len(episodes)
    values = {(each.group * grouped, round(returns.get(each.trajectory_id, each.success), 9)) for each in episodes}
    counts = [*Counter(group for group, _ in values).values()]  # different returns of each group
    equal = counts.count(1)
    spread = f"in {equal} of {len(counts)} groups all returns are equal"
    if not grouped:
        spread = "all returns are equal" if equal else "not all returns are equal"
    ends = Counter(each.outcome for each in episodes)
    golds = {question.question_id: normalize("".join(question.answers[:1])) for question in questions}
    if 2 * len(prose) >= actions:
        share = f"{len(prose)} of {actions} actions are neither a call nor an answer"
        quoted = repr(shorten(prose[0], LONGEST, placeholder=" ..."))
        yield f"{share}, the first {quoted}, and {spread}; what helps, in this order: {TEACH}"
    elif ends.keys() <= UNANSWERED and all(golds[each.question_id] for each in episodes):
        limits = ", ".join(f"{end} {count}" for end, count in ends.items())
        yield f"no episode comes to an answer ({limits}), and {spread}; what helps: {LIMITS}"
    elif equal >= lost * len(counts) and fmean(each.success for each in episodes) < 0.5:
        yield f"{spread}, and tell no action from another; what helps: {SPREAD}"
    answers = [(normalize(each.answer), golds[each.question_id]) for each in episodes if each.answer]
    closed = [pair for pair in answers if pair[1] in ("yes", "no")]
    for kind, pairs in (("", answers), (" to yes/no questions", closed)):
        for word, count in Counter(answer for answer, _ in pairs).most_common(1):
            right = pairs.count((word, word))
            several = len({gold for _, gold in pairs}) > 1
            if several and count >= max(FEWEST, HABIT * len(pairs)) and right <= RIGHT * count:
                share = f"{count} of {len(pairs)} answers{kind} are {word!r}, {right} of them right"
                yield f"{share}; what helps: {BALANCE}"


def _prose(trajectory: Trajectory, chat: Chat) -> Iterator[str]:
    """The texts of the actions that are neither a call nor an answer."""
    malformed = (step for step in trajectory.steps if step.call_status is CallStatus.MALFORMED)
    spans = (slice(step.action_start, step.action_stop) for step in malformed)
    return filter(is_prose, (chat.decode(trajectory.ids(span, Source.ACTION)) for span in spans))
