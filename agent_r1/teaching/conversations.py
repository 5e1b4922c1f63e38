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

    def __init__(self, conversation: Conversation, env: Env, answers: Answers, seed: int) -> None:
        """Tools, examples and a missing system message are those of `env`. `seed` is not used."""
        self.system = conversation.system or env.system
        self.user = conversation.user
        self.tools = env.tools
        self.examples = env.examples
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


def _environment_of(conversation: Conversation, envs: Mapping[str, Env]) -> Env:
    """The environment of its data set, from `envs` by data set.

    Raises ValueError, with the remedy, for a conversation that was in none of them.
    """
    dataset = conversation.dataset or next(iter(envs))
    if dataset not in envs:
        raise ValueError(f"{conversation.where}: there is no data set {reprlib.repr(dataset)}{nearest(dataset, envs)}")
    env = envs[dataset]
    if not conversation.dataset and any(
        (env.system, env.tools) != (candidate.system, candidate.tools) for candidate in envs.values()
    ):
        remedy = f'name its own beside the messages, such as "dataset": "{dataset}"'
        raise ValueError(f"{conversation.where}: the data sets {', '.join(envs)} differ in their prompts; {remedy}")
    require_tools(conversation, env.tools, dataset)
    return env


def retell(
    conversations: Sequence[Conversation], questions: Sequence[Question], chat: Chat, index: Cached, settings: Params
) -> list[Trajectory]:
    """The conversations as trajectories, made by the loop and the renderer that make the policy's own.

    Their prompts are those of the data sets of the questions. Raises ValueError for one that no data set could have
    had, and for one that is longer than `env.max_tokens`.
    """
    sampler = ScriptedSampler([conversation.actions for conversation in conversations], chat)
    limits = settings.env.model_copy(update={"max_action_tokens": settings.env.max_tokens})
    with Shared(limits, index) as shared:
        first = attempts_at(questions, shared, outside=False)
        envs = dict(
            zip(dict.fromkeys(row.dataset for row in questions), openings(first, questions, shared), strict=True)
        )
        attempts = list[Attempt]()
        for group, conversation in enumerate(conversations):
            env = partial(Retold, conversation, _environment_of(conversation, envs), limits.answers)
            attempts.append(Attempt(question_id=conversation.where, group=group, sample=0, env=env))
        trajectories = collect(sampler, chat, attempts, shared, seed=settings.warm_start.seed)
    for row in trajectories:
        if row.outcome is Outcome.TOKEN_LIMIT or row.steps[-1].stop_reason is not StopReason.END:
            raise ValueError(
                f"{row.question_id}: longer than env.max_tokens {limits.max_tokens}; shorten it, leave it out, or "
                "raise env.max_tokens"
            )
    _warn_of_malformed(trajectories)
    return trajectories


def _warn_of_malformed(trajectories: Sequence[Trajectory]) -> None:
    steps = [(trajectory.question_id, step) for trajectory in trajectories for step in trajectory.steps]
    malformed = [where for where, step in steps if step.call_status is CallStatus.MALFORMED]
    if malformed:
        logger.warning(
            "%d of %d actions of the conversations, one in %s, are neither one tool call nor one answer in the tags "
            "that the environment reads, and are learned as they are",
            len(malformed),
            len(steps),
            malformed[0],
        )
