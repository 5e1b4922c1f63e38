"""Conversations, of one's own runs or of a teacher, told again as trajectories to learn from."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping, Sequence
from functools import partial

from agent_r1.envs.base import Attempt, Conversation, Env, ParsedAction, Transition, parse_action
from agent_r1.envs.conversations import require_tools
from agent_r1.envs.kinds import attempts_at, openings
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import canonical
from agent_r1.params import Params
from agent_r1.params.env import Answers
from agent_r1.params.sections import nearest
from agent_r1.records import Call, CallStatus, Outcome, Question, StopReason, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.search.index import Cached

logger = logging.getLogger(__name__)


class Retold(Env):
    """The other side of a conversation that is over: it repeats its observations, whatever the action."""

    def __init__(self, conversation: Conversation, asked: Env, answers: Answers, seed: int) -> None:
        """Tools, examples and a missing system message are those of `asked`. `seed` is not used."""
        self.system = conversation.system or asked.system
        self.user = conversation.user
        self.tools = asked.tools
        self.examples = asked.examples
        self._answers = answers
        self._observations = iter(conversation.observations)

    async def step(self, action: str) -> Transition:
        """Takes an action's text, without its end token."""
        parsed = parse_action(action, answers=self._answers)
        calls = tuple(
            Call(tool=call.tool, arguments=canonical(call.arguments), status=CallStatus.OK) for call in parsed.calls
        )
        if parsed.problem:
            calls = (Call(status=CallStatus.MALFORMED),)
        observation = next(self._observations, None)
        if observation is None:
            return Transition(outcome=_end(parsed), answer=parsed.answer or "", calls=calls)
        return Transition(observations=(observation,), calls=calls)


def _end(last: ParsedAction) -> Outcome:
    if last.answer is not None:
        return Outcome.ANSWERED
    return Outcome.MALFORMED if last.problem else Outcome.TURN_LIMIT


def _environment_of(each: Conversation, known: Mapping[str, Env]) -> Env:
    """The environment of its data set, from the `known` ones.

    Raises ValueError, with the remedy, for a conversation that was in none of them.
    """
    dataset = each.dataset or next(iter(known))
    if dataset not in known:
        raise ValueError(f"{each.where}: there is no data set {reprlib.repr(dataset)}{nearest(dataset, known)}")
    env = known[dataset]
    if not each.dataset and any((env.system, env.tools) != (other.system, other.tools) for other in known.values()):
        remedy = f'name its own beside the messages, such as "dataset": "{dataset}"'
        raise ValueError(f"{each.where}: the data sets {', '.join(known)} differ in their prompts; {remedy}")
    require_tools(each, env.tools, dataset)
    return env


def retell(
    conversations: Sequence[Conversation], questions: Sequence[Question], chat: Chat, index: Cached, settings: Params
) -> list[Trajectory]:
    """The conversations as trajectories, made by the loop and the renderer that make the policy's own.

    Their prompts are those of the data sets of the questions. Raises ValueError for one that no data set could have
    had, and for one that is longer than `env.max_tokens`.
    """
    sampler = ScriptedSampler([each.actions for each in conversations], chat)
    limits = settings.env.model_copy(update={"max_action_tokens": settings.env.max_tokens})
    with Shared(limits, index) as shared:
        opened = openings(attempts_at(questions, shared, outside=False), questions, shared)
        known = dict(zip(dict.fromkeys(each.dataset for each in questions), opened, strict=True))
        asked = [_environment_of(each, known) for each in conversations]
        attempts = [
            Attempt(question_id=each.where, group=group, sample=0, env=partial(Retold, each, env, limits.answers))
            for group, (each, env) in enumerate(zip(conversations, asked, strict=True))
        ]
        trajectories = collect(sampler, chat, attempts, shared, seed=settings.warm_start.seed)
    for each in trajectories:
        if each.outcome is Outcome.TOKEN_LIMIT or each.steps[-1].stop_reason is not StopReason.END:
            raise ValueError(
                f"{each.question_id}: longer than env.max_tokens {limits.max_tokens}; shorten it, leave it out, or "
                "raise env.max_tokens"
            )
    _warn_of_malformed(trajectories)
    return trajectories


def _warn_of_malformed(trajectories: Sequence[Trajectory]) -> None:
    steps = [(each.question_id, step) for each in trajectories for step in each.steps]
    malformed = [where for where, step in steps if step.call_status is CallStatus.MALFORMED]
    if malformed:
        logger.warning(
            "%d of %d actions of the conversations, one in %s, are neither one tool call nor one answer in the tags "
            "that the environment reads, and are learned as they are",
            len(malformed),
            len(steps),
            malformed[0],
        )
