"""Episodes: the policy and the environments take turns, and token ids are only ever appended to a context."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent_r1.envs.base import Attempt, Transition, opened
from agent_r1.envs.context import Summary, in_context
from agent_r1.envs.shared import Shared
from agent_r1.faults import WorldFault, require_few
from agent_r1.params.env import EnvParams
from agent_r1.records import Outcome, Source, Step, StopReason, Trajectory
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.codec import Encoded
from agent_r1.rollout.order import Act, Arrivals, Rounds, compare, order_of
from agent_r1.rollout.sampling import Action, EngineError, Request, Sampler
from agent_r1.seeds import derive

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """A step that was just taken, as text for those who look on. Nothing of it is tokenised again."""

    step: Step
    action: str  # decoded, with the thought's tag where the prompt wrote it, without the end token that closed it
    observations: tuple[str, ...]  # what the policy reads next, for each call; nothing where the episode ends
    outcome: Outcome | None  # None while the episode goes on
    answer: str  # the text between the answer tags, "" without one
    fault: str  # what the world did wrong, where the episode is ABORTED, else ""
    tokens: int  # of the episode so far


class PromptTooLong(ValueError):
    """A question leaves no room for an action in its context."""


def collect(
    sampler: Sampler,
    chat: Chat,
    attempts: Sequence[Attempt],
    shared: Shared,
    *,
    seed: int,
    iteration: int = 0,
    policy_version: int = 0,
    greedy: bool = False,
    told: bool = False,
) -> list[Trajectory]:
    """Runs all episodes to their ends, in the order of `shared.limits.order`.

    In rounds, every episode that still lives gets one action in one call; their environments answer at the same time,
    so that a round waits for the slowest and not for their sum. By arrival no episode waits for another.

    An episode whose next observation would leave no room for another action ends as TOKEN_LIMIT; the observation is
    not appended, and earns nothing. Where the environment or `shared.limits.context` rewrites the context, or the chat
    template renders the history in another way than it did, a new context begins; see `Dialogue`.

    Episodes that the world cuts short are made again once, with the same seeds; those that it cuts short again are
    ABORTED. A TooManyAborted says that they are more than the share of `env.aborted_share`.

    Every action's seed is derived from (seed, iteration, question, sample, step). Of `shared.limits`, `max_tokens`
    bounds a context and `max_action_tokens` one action. Where the sampler is to be `told`, requests hold messages too.
    A PromptTooLong says that a prompt leaves no room for an action, another ValueError that the sampler knows rounds
    alone.
    """
    limits = shared.limits
    chat.frames(limits.parallel_calls)  # refuses before anything is sampled

    def play(indices: Iterable[int]) -> dict[int, _Episode]:
        begun = {index: _Episode(attempts[index], chat, limits, (seed, iteration), policy_version) for index in indices}
        order = order_of(sampler, limits.order, len(begun))
        plays = (_play(episode, index, order, greedy=greedy, told=told) for index, episode in begun.items())
        shared.run(_together(plays))
        return begun

    episodes = play(range(len(attempts)))
    if aborted := _faults(episodes):
        log.warning("the world cut %d of %d episodes short: %s", len(aborted), len(episodes), min(aborted.values()))
        episodes |= play(aborted)
        aborted, share = _faults(episodes), limits.aborted_share
        how = f"in a second attempt too, and env.aborted_share is {share}: {min(aborted.values(), default='')}"
        require_few(len(aborted), len(episodes), share, how)
    return [episode.finish() for episode in episodes.values()]


def attend(
    act: Act, chat: Chat, attempt: Attempt, shared: Shared, *, seed: int, episode: int = 0
) -> AsyncGenerator[StepView]:
    """Runs one episode and gives each step as soon as it is taken; its tokens are those that `collect` would collect.

    To be iterated in the loop of `shared`, where others may be at the same time, and closed (`aclose`) where it is left
    before its end. Arguments and errors are those of `collect`; `episode` tells it from those beside it.
    """
    return _steps(_Episode(attempt, chat, shared.limits, (seed, 0), policy_version=0), episode, act)


def follow(sampler: Sampler, chat: Chat, attempt: Attempt, shared: Shared, *, seed: int) -> Iterator[StepView]:
    """The same for one who waits for each step."""
    steps = attend(Rounds(sampler.sample, 1).act, chat, attempt, shared, seed=seed)
    try:
        while view := shared.run(_next(steps)):
            yield view
    finally:
        shared.run(steps.aclose())


async def _next(steps: AsyncGenerator[StepView]) -> StepView | None:
    return await anext(steps, None)


def prove_order(sampler: Sampler, chat: Chat, attempts: Sequence[Attempt], shared: Shared) -> dict[str, float]:
    """What `compare` finds of the episodes' first contexts; nothing in rounds, where the company is always the same."""
    if shared.limits.order == "rounds":
        return {}
    envs = [shared.run(opened(attempt.env(0))) for attempt in attempts]
    contexts = [Dialogue(chat, env.system, env.user, env.tools).opening.ids for env in envs]
    return shared.run(compare(sampler, contexts, shared.limits))


async def _play(episode: _Episode, index: int, order: Rounds | Arrivals, *, greedy: bool, told: bool) -> None:
    async for _ in _steps(episode, index, order.act, greedy=greedy, told=told):
        pass
    order.leave()


async def _steps(
    episode: _Episode, index: int, act: Act, *, greedy: bool = False, told: bool = False
) -> AsyncGenerator[StepView]:
    try:
        await episode.open()
        while episode.outcome is None:
            request = episode.request(index, greedy=greedy, told=told)
            try:
                action = await act(request)
            except WorldFault as fault:
                episode.abort(fault)
                return
            yield await episode.advance(request, action)
    finally:
        await episode.close()


async def _together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs them at the same time. The first error ends the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in coroutines:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _faults(episodes: Mapping[int, _Episode]) -> dict[int, str]:
    """What the world did wrong, of each episode that it cut short."""
    return {index: episode.fault for index, episode in episodes.items() if episode.fault}


class _Episode:
    """The state of one running episode."""

    def __init__(
        self, attempt: Attempt, chat: Chat, limits: EnvParams, seed: tuple[int, int], policy_version: int
    ) -> None:
        """`seed` is of the collection and its iteration."""
        self._attempt, self._chat, self._limits = attempt, chat, limits
        self._iteration, self._policy_version = seed[1], policy_version
        self._seed_parts = (*seed, attempt.question_id, attempt.sample)
        self._env = in_context(attempt.env(derive(*self._seed_parts, "env")), limits.context)
        self._context_starts = [0]
        self._ids: list[int] = []
        self._source: list[int] = []
        self._logprobs: list[float] = []
        self._steps: list[Step] = []
        self._answer = ""
        self.outcome: Outcome | None = None
        self.fault = ""

    async def open(self) -> None:
        """Opens the environment and begins the first context."""
        try:
            await self._env.open()
        except WorldFault as fault:
            self.abort(fault)
            return
        self._dialogue = Dialogue(self._chat, self._env.system, self._env.user, self._env.tools)
        self._append(self._dialogue.opening)
        if self._room() < 1:
            raise PromptTooLong(
                f"the prompt of question {self._attempt.question_id!r} has {len(self._ids)} tokens and max_tokens is "
                f"{self._limits.max_tokens}: no room for an action; raise env.max_tokens or show fewer passages"
            )

    async def close(self) -> None:
        await self._env.close()

    def abort(self, fault: WorldFault) -> None:
        """Ends the episode, because the world failed between two steps."""
        self.outcome, self.fault = Outcome.ABORTED, fault.words

    def request(self, index: int, *, greedy: bool, told: bool = False) -> Request:
        return Request(
            episode=index,
            step=len(self._steps),
            context=self._context(),
            seed=derive(*self._seed_parts, len(self._steps)),
            max_tokens=min(self._limits.max_action_tokens, self._room()),
            greedy=greedy,
            summary=isinstance(self._env, Summary) and self._env.asks,
            messages=self._dialogue.messages() if told else (),
        )

    async def advance(self, request: Request, action: Action) -> StepView:
        """Appends the sampled action, lets the environment answer it, and appends what comes back."""
        self._check(request, action)
        start = len(self._ids)
        self._ids += action.token_ids
        self._source += [Source.ACTION] * len(action.token_ids)
        self._logprobs += action.logprobs.tolist()
        closed = action.stop_reason is StopReason.END
        said = self._chat.decode(action.token_ids[:-1] if closed else action.token_ids)
        text = self._chat.opened(request.context) + said
        try:
            transition = await self._env.step(text)
        except WorldFault as fault:
            transition = Transition(outcome=Outcome.ABORTED, fault=fault.words)
        self._observe(transition, action.token_ids, closed)
        read = self.outcome is None
        step = Step(
            action_start=start,
            action_stop=start + len(action.token_ids),
            stop_reason=action.stop_reason,
            calls=list(transition.calls),
            rewards=transition.rewards | (transition.rewards_when_read if read else {}),
        )
        self._steps.append(step)
        return StepView(
            step=step,
            action=text,
            observations=transition.observations if read else (),
            outcome=self.outcome,
            answer=self._answer,
            fault=self.fault,
            tokens=len(self._ids),
        )

    def finish(self) -> Trajectory:
        if self.outcome is None:
            raise RuntimeError(f"the episode of question {self._attempt.question_id!r} is not over")
        attempt = self._attempt
        return Trajectory(
            trajectory_id=f"{self._iteration}/{attempt.question_id}/{attempt.sample}",
            question_id=attempt.question_id,
            group=attempt.group,
            sample=attempt.sample,
            seed=derive(*self._seed_parts),
            policy_version=self._policy_version,
            iteration=self._iteration,
            token_ids=np.array(self._ids, np.int32),
            source=np.array(self._source, np.uint8),
            logprobs=np.array(self._logprobs, np.float32),
            context_starts=self._context_starts,
            steps=self._steps,
            outcome=self.outcome,
            answer=self._answer,
        )

    def _check(self, request: Request, action: Action) -> None:
        """Refuses what is no answer to the request; what comes from an engine is trusted no further."""
        ids, logprobs, most = action.token_ids, action.logprobs, request.max_tokens
        if not 1 <= len(ids) == len(logprobs) <= most:
            raise EngineError(f"an action of at most {most} tokens has {len(ids)} and {len(logprobs)} logprobs")
        if not np.isfinite(logprobs).all():
            raise EngineError(
                f"an action's logprobs are not all finite: question {self._attempt.question_id!r}, sample "
                f"{self._attempt.sample}, step {request.step}, weights of version {self._policy_version}; start again "
                "from the checkpoint with a lower train.update.learning_rate"
            )
        if (action.stop_reason is StopReason.END) != (ids[-1] == self._chat.end_id):
            raise EngineError(f"an action stopped by {action.stop_reason} ends with token {ids[-1]}")
        if self._context() != request.context:
            raise RuntimeError("a context changed while its action was sampled: it may only grow by what is appended")

    def _observe(self, transition: Transition, action: list[int], closed: bool) -> None:
        if transition.outcome is not None:
            self.outcome, self._answer, self.fault = transition.outcome, transition.answer, transition.fault
            return
        reply = self._dialogue.reply(action, transition.observations, closed=closed, restart=transition.restart)
        if len(reply.ids) >= (self._limits.max_tokens if reply.restarts else self._room()):
            self.outcome = Outcome.TOKEN_LIMIT
            return
        if reply.restarts:
            self._context_starts.append(len(self._ids))
        self._append(reply)

    def _append(self, tokens: Encoded) -> None:
        self._ids += tokens.ids
        self._source += tokens.source
        self._logprobs += [0.0] * len(tokens.ids)

    def _context(self) -> list[int]:
        return self._ids[self._context_starts[-1] :]

    def _room(self) -> int:
        return self._limits.max_tokens - (len(self._ids) - self._context_starts[-1])


class ScriptedSampler:
    """Plays given action texts with logprobs of 0; one that is too long for its request is cut, as a policy's is."""

    def __init__(self, scripts: Sequence[Iterable[str]], chat: Chat) -> None:
        """`scripts[episode]` are its actions' texts, without the end token; each is asked for when its turn has come.

        An episode that is made again begins its script again. A summary that is asked for between is empty.
        """
        self._scripts, self._chat = scripts, chat
        self._playing: dict[int, Iterator[str]] = {}

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """The next action of each request's script; a script must last as long as its episode."""
        actions = []
        for request in requests:
            if request.step == 0:
                self._playing[request.episode] = iter(self._scripts[request.episode])
            text = "" if request.summary else next(self._playing[request.episode], None)
            if text is None:
                raise ValueError(f"the script of episode {request.episode} ends before the episode does")
            ids = self._chat.encode_action(text, request.context)[: request.max_tokens]
            actions.append(Action.of(ids, [0.0] * len(ids), self._chat.end_id))
        return actions

    async def act(self, request: Request) -> Action:
        """The same whoever else asks."""
        [action] = self.sample([request])
        return action
