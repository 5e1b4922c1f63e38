"""Episodes: the policy and the environments take turns, and token ids are only ever appended to a context."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agent_r1.envs.base import Attempt, opened
from agent_r1.envs.shared import Shared
from agent_r1.faults import WorldFault, require_few
from agent_r1.params.env import EnvParams, Order
from agent_r1.records import Trajectory
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.episode import Episode, StepView
from agent_r1.rollout.sampling import Action, Flowing, Request, Sampler
from agent_r1.seeds import derive

Sample = Callable[[Sequence[Request]], Sequence[Action]]
Act = Callable[[Request], Awaitable[Action]]

_COMPARED = 16  # requests that are sampled three times
_CROWD = 64  # in which the last time is, those among them


class Rounds:
    """A batch leaves when every episode that lives has asked, in the order of the episodes.

    So the batches, and with them every bit, are the same however long the environments take.
    """

    def __init__(self, sample: Sample, episodes: int) -> None:
        self._sample, self._living = sample, episodes
        self._asked: list[tuple[Request, asyncio.Future[Action]]] = []

    async def act(self, request: Request) -> Action:
        """The action that is sampled for a request."""
        answer: asyncio.Future[Action] = asyncio.get_running_loop().create_future()
        self._asked.append((request, answer))
        self._leave_if_complete()
        return await answer

    def leave(self) -> None:
        """To be said once for every episode: it asks for nothing more."""
        self._living -= 1
        self._leave_if_complete()

    def _leave_if_complete(self) -> None:
        if not self._asked or len(self._asked) < self._living:
            return
        batch = sorted(self._asked, key=lambda asked: asked[0].episode)
        self._asked = []
        actions = self._sample([request for request, _ in batch])
        for (_, answer), action in zip(batch, actions, strict=True):
            answer.set_result(action)


class Arrivals:
    """A request leaves as soon as its episode has it, so that no episode waits for another's environment.

    Every action has the draws of its own seed; whether it also has the same bits in any company, `compare` says.
    """

    def __init__(self, sampler: Flowing) -> None:
        self._sampler = sampler

    async def act(self, request: Request) -> Action:
        """The action that is sampled for a request."""
        return await self._sampler.act(request)

    def leave(self) -> None:
        """As in rounds, where others wait for it."""


class OneByOne:
    """Requests are sampled one after the other, in a thread, so that whoever waits for something else goes on."""

    def __init__(self, sample: Sample) -> None:
        self._sample, self._turn = sample, asyncio.Lock()

    async def act(self, request: Request) -> Action:
        """The action that is sampled for a request."""
        async with self._turn:
            [action] = await asyncio.to_thread(self._sample, [request])
            return action


def at_once(sampler: Sampler) -> Act:
    """Has each request sampled without waiting for others, among those under way where the sampler can do that."""
    return sampler.act if isinstance(sampler, Flowing) else OneByOne(sampler.sample).act


def order_of(sampler: Sampler, order: Order, episodes: int) -> Rounds | Arrivals:
    """What `env.order` asks for. Raises ValueError for a sampler that knows rounds alone."""
    return Rounds(sampler.sample, episodes) if order == "rounds" else Arrivals(_flowing(sampler, order))


async def compare(sampler: Sampler, contexts: Sequence[Sequence[int]], limits: EnvParams) -> dict[str, float]:
    """By how much actions depend on who is sampled at the same time.

    The same 16 requests are sampled together, one by one, and in another order among 48 others; their contexts [T] are
    taken in turn. Raises ValueError if the actions differ in any bit and the order is `exact_arrival`.
    """
    act = _flowing(sampler, limits.order).act
    crowd = [_request(index, contexts[index % len(contexts)], limits) for index in range(_CROWD)]
    compared = crowd[:_COMPARED]
    together = await asyncio.gather(*map(act, compared))
    alone = [await act(request) for request in compared]
    shuffled = np.random.default_rng(derive("order")).permutation(_CROWD).tolist()
    found = dict(zip(shuffled, await asyncio.gather(*(act(crowd[index]) for index in shuffled)), strict=True))
    gaps, changed = zip(*map(apart, together * 2, [*alone, *(found[index] for index in range(_COMPARED))]), strict=True)
    metrics = {"order/logprob_gap": float(np.max(gaps)), "order/changed_tokens": float(sum(changed))}
    _judge(limits.order, **{name.removeprefix("order/"): value for name, value in metrics.items()})
    return metrics


def apart(one: Action, other: Action) -> tuple[float, int]:
    """The largest gap in nats while the ids agree, and the number of tokens from the first on that does not."""
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
    shorter, longer = sorted((len(one.token_ids), len(other.token_ids)))
    alike = next((at for at, (left, right) in pairs if left != right), shorter)
    return float(np.abs(one.logprobs[:alike] - other.logprobs[:alike]).max(initial=0.0)), longer - alike


def _judge(order: Order, *, logprob_gap: float, changed_tokens: float) -> None:
    if logprob_gap == changed_tokens == 0:
        log.info("an action has the same bits together, alone and in a crowd: arrivals change nothing")
        return
    found = f"actions depend on their company, by up to {logprob_gap:.2g} nats and in {changed_tokens:.0f} tokens"
    if order == "exact_arrival":
        raise ValueError(
            f"{found}, and env.order is exact_arrival; set it to rounds, which is exact, or to arrival, which goes on, "
            "or give vLLM one thread on a CPU (engine.vllm.threads: 1)"
        )
    log.warning("%s: this training is reproducible but for that; env.order: rounds is exact", found)


def _request(index: int, context: Sequence[int], limits: EnvParams) -> Request:
    kept = list(context[: limits.max_tokens - 1])
    room = min(limits.max_action_tokens, limits.max_tokens - len(kept))
    return Request(episode=index, step=0, context=kept, seed=derive("order", index), max_tokens=room)


def _flowing(sampler: Sampler, order: Order) -> Flowing:
    if isinstance(sampler, Flowing):
        return sampler
    raise ValueError(
        f"{type(sampler).__name__} takes no request in while it answers others, and env.order is {order}; set "
        "env.order: rounds, or engine.kind: vllm or server"
    )


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
