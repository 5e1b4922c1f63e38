"""Episodes: the policy and the environments take turns, and token ids are only ever appended to a context."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

from agent_r1.envs.base import Attempt, opened
from agent_r1.envs.shared import Shared
from agent_r1.faults import WorldFault, require_few
from agent_r1.records import Trajectory
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.episode import Episode, StepView
from agent_r1.rollout.order import Act, Arrivals, Rounds, compare, order_of
from agent_r1.rollout.sampling import Action, Request, Sampler

log = logging.getLogger(__name__)


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
    over: Callable[[], None] = lambda: None,
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
    `over` is called as each episode ends, for those who look on.
    A PromptTooLong says that a prompt leaves no room for an action, another ValueError that the sampler knows rounds
    alone.
    """
    limits = shared.limits
    chat.frames(limits.parallel_calls)  # refuses before anything is sampled

    def play(indices: Iterable[int]) -> dict[int, Episode]:
        begun = {index: Episode(attempts[index], chat, limits, (seed, iteration), policy_version) for index in indices}
        order = order_of(sampler, limits.order, len(begun))
        plays = (_play(episode, index, order, over, greedy=greedy, told=told) for index, episode in begun.items())
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
    return _steps(Episode(attempt, chat, shared.limits, (seed, 0), policy_version=0), episode, act)


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


async def _play(
    episode: Episode, index: int, order: Rounds | Arrivals, over: Callable[[], None], *, greedy: bool, told: bool
) -> None:
    async for _ in _steps(episode, index, order.act, greedy=greedy, told=told):
        pass
    over()
    order.leave()


async def _steps(
    episode: Episode, index: int, act: Act, *, greedy: bool = False, told: bool = False
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


def _faults(episodes: Mapping[int, Episode]) -> dict[int, str]:
    """What the world did wrong, of each episode that it cut short."""
    return {index: episode.fault for index, episode in episodes.items() if episode.fault}


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
