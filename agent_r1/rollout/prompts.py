"""Prompts, measured before anything is loaded that costs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

from agent_r1.envs.base import Attempt
from agent_r1.envs.kinds import foretold
from agent_r1.envs.shared import Shared
from agent_r1.rollout.chat import Chat, Dialogue

UNANSWERED = "each counts as an answer of nothing (token_limit)"
_NAMED = 3

logger = logging.getLogger(__name__)


def without_room(
    attempts: Sequence[Attempt], chat: Chat, shared: Shared, which: str, then: str = "they are left out"
) -> set[str]:
    """The ids of questions whose prompts leave no room for an action, said in one line.

    `which` names all questions of the attempts, `then` says what becomes of these. Those whose prompts are not
    `foretold` are not among them: their episodes end as TOKEN_LIMIT. Raises ValueError for more of them than the share
    `env.too_long_share`.
    """
    limits = shared.limits
    questions = {attempt.question_id: attempt for attempt in attempts}
    prompts = (
        (name, Dialogue.of(chat, attempt.env(0)).prompt) for name, attempt in questions.items() if foretold(attempt)
    )
    # a token takes a byte or more: the others have room
    doubtful = {name: prompt for name, prompt in prompts if len(prompt.encode()) >= limits.max_tokens}
    long = {
        name: tokens
        for name, tokens in zip(doubtful, chat.lengths(doubtful.values()), strict=True)
        if tokens >= limits.max_tokens
    }
    if not long:
        return set()
    problem = (
        f"{len(long)} of {len(questions)} {which} leave no room for an action in env.max_tokens {limits.max_tokens}, "
        f"such as {', '.join(map(repr, islice(long, _NAMED)))}; the longest prompt has {max(long.values())} tokens"
    )
    remedy = f"raise env.max_tokens{' or shorten env.examples' * bool(limits.examples)}"
    if len(long) > limits.too_long_share * len(questions):
        remedy += f", or raise env.too_long_share {limits.too_long_share:g}, up to which {then}"
        raise ValueError(f"{problem}; {remedy}")
    logger.warning("%s; %s; %s to ask them", problem, then, remedy)
    return set(long)
