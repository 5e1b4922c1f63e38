"""Episodes: the policy and the environments take turns, and token ids are only ever appended to a context."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from agent_r1.envs.base import Attempt, opened, parse_action
from agent_r1.envs.shared import Shared
from agent_r1.faults import ContextFull, WorldFault, require_few
from agent_r1.params.env import EnvParams, Order
from agent_r1.records import Metrics, Outcome, Trajectory
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.episode import PLAY, Episode, Play, PromptTooLong, StepView
from agent_r1.rollout.sampling import Action, Flowing, Request, Sampler
from agent_r1.seeds import derive
from agent_r1.surroundings import room

Sample = Callable[[Sequence[Request]], Sequence[Action]]
Act = Callable[[Request], Awaitable[Action]]

_COMPARED = 16  # requests that `compare` samples three times
_CROWD = 64  # requests that the last of these times samples together

logger = logging.getLogger(__name__)

E = TypeVar("E")


class Rounds:
    """Sends a batch once every living episode has asked, in their order: no bit depends on how long worlds take."""

    def __init__(self, sample: Sample, episodes: int) -> None:
        self._sample = sample
        self._living = episodes
        self._asked = list[tuple[Request, asyncio.Future[Action]]]()

    async def act(self, request: Request) -> Action:
        """The action that is sampled for a request."""
        answer: asyncio.Future[Action] = asyncio.get_running_loop().create_future()
        self._asked.append((request, answer))
        self._leave_if_complete()
        return await answer

    def leave(self) -> None:
        """Notes, once for every episode, that it asks for nothing more."""
        self._living -= 1
        self._leave_if_complete()

    def _leave_if_complete(self) -> None:
        if not self._asked or len(self._asked) < self._living:
            return
        batch = sorted(self._asked, key=lambda entry: entry[0].episode)
        self._asked = []
        try:
            actions = self._sample([request for request, _ in batch])
        except (WorldFault, ContextFull) as fault:
            for _, answer in batch:
                answer.set_exception(fault)
        else:
            for (_, answer), action in zip(batch, actions, strict=True):
                answer.set_result(action)


def at_once(sampler: Sampler) -> Act:
    """Has each request sampled without waiting for others, among the requests under way if the sampler can do that.

    Other samplers get one request after the other, in a thread, so that other tasks go on meanwhile.
    """
    if isinstance(sampler, Flowing):
        return sampler.act
    turn = asyncio.Lock()

    async def act(request: Request) -> Action:
        async with turn:
            [action] = await asyncio.to_thread(sampler.sample, [request])
            return action

    return act


def flowing(sampler: Sampler, order: Order) -> Flowing:
    """The sampler, which takes requests in while it answers others; a ValueError if it does not."""
    if isinstance(sampler, Flowing):
        return sampler
    raise ValueError(
        f"{type(sampler).__name__} takes no request in while it answers others, and env.order is {order}; set "
        "env.order: rounds, or engine.kind: vllm or server"
    )


def collect(
    sampler: Sampler, chat: Chat, attempts: Sequence[Attempt], shared: Shared, *, seed: int, play: Play = PLAY
) -> list[Trajectory]:
    """Runs all episodes to their ends, in the order of `shared.limits.order`.

    In rounds, every living episode gets one action in one call; their environments answer at the same time, so that a
    round waits for the slowest and not for their sum. By arrival no episode under way waits for another, and one begins
    as soon as there is `surroundings.room` for its connections.

    An episode whose prompt or next observation would leave no room for another action ends as TOKEN_LIMIT; that is not
    appended, and earns nothing. A new context begins where the environment or `shared.limits.context` rewrites the
    context, or the chat template renders the history in another way than before; see `Dialogue`.

    Episodes that the world cuts short are made again once, with the same seeds; the ones cut short again are ABORTED.

    Every action's seed is derived from (seed, iteration, question, sample, step). `shared.limits.max_tokens` bounds a
    context and `max_action_tokens` one action.

    Raises TooManyAborted if more than the share `env.aborted_share` is cut short, and ValueError if the sampler knows
    rounds alone.
    """
    limits = shared.limits
    chat.frames(limits.parallel_calls)  # refuses before anything is sampled

    def run(indices: Iterable[int]) -> dict[int, Episode]:
        batch = {index: Episode(attempts[index], chat, limits, seed, play) for index in indices}
        rounds = Rounds(sampler.sample, len(batch)) if limits.order == "rounds" else None
        act = rounds.act if rounds else flowing(sampler, limits.order).act
        on_end = [call for call in (play.over, rounds and rounds.leave) if call]
        places = asyncio.Semaphore(len(batch) if rounds else room())
        shared.run(together(_to_its_end(episode, index, act, on_end, places) for index, episode in batch.items()))
        return batch

    episodes = twice(
        run,
        len(attempts),
        lambda episode: episode.fault,
        limits.aborted_share,
        "the world cut %d of %d episodes short: %s",
    )
    if full := [episode.full for episode in episodes.values() if episode.full]:
        logger.warning("%d of %d episodes end where the model has no room left: %s", len(full), len(episodes), full[0])
    if limits.calls == "lenient":
        shared.measured["rollout/lenient_actions"] += sum(episode.lenient for episode in episodes.values())
    return [episode.finish() for episode in episodes.values()]


def attend(
    act: Act, chat: Chat, attempt: Attempt, shared: Shared, *, seed: int, episode: int = 0
) -> AsyncGenerator[StepView]:
    """Runs one episode and gives each step as soon as it is taken; `collect` would collect the same tokens.

    Iterate it in the loop of `shared`, where several may run at the same time, and close it (`aclose`) if it is left
    before its end. Arguments and errors are those of `collect`; `episode` is its number among the running ones.
    """
    return _steps(Episode(attempt, chat, shared.limits, seed), episode, act)


def follow(sampler: Sampler, chat: Chat, attempt: Attempt, shared: Shared, *, seed: int) -> Iterator[StepView]:
    """Runs one episode like `attend`, and waits for each step."""
    steps = attend(Rounds(sampler.sample, 1).act, chat, attempt, shared, seed=seed)

    async def next_step() -> StepView | None:
        return await anext(steps, None)

    try:
        while view := shared.run(next_step()):
            yield view
    finally:
        shared.run(steps.aclose())


async def _to_its_end(
    episode: Episode, index: int, act: Act, on_end: Sequence[Callable[[], None]], places: asyncio.Semaphore
) -> None:
    async with places:
        try:
            async for _ in _steps(episode, index, act):
                pass
        except PromptTooLong as fault:
            episode.outcome = Outcome.TOKEN_LIMIT
            episode.full = str(fault)
    for call in on_end:
        call()


async def _steps(episode: Episode, index: int, act: Act) -> AsyncGenerator[StepView]:
    try:
        await episode.open()
        while episode.outcome is None:
            request = episode.request(index)
            try:
                action = episode.given(request) or await act(request)
            except WorldFault as fault:
                episode.abort(fault)
                return
            except ContextFull as full:
                episode.outcome = Outcome.TOKEN_LIMIT
                episode.full = str(full)
                return
            yield await episode.advance(request, action)
    finally:
        await episode.close()


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs coroutines at the same time. The first error ends the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def twice(
    run: Callable[[Collection[int]], dict[int, E]], count: int, fault: Callable[[E], str], share: float, message: str
) -> dict[int, E]:
    """So many episodes by their numbers, of which those that end with a `fault` are made again once.

    `message` is logged of them, with their number, that of all, and a fault. Raises TooManyAborted if more than the
    share ends with a fault again.
    """

    def cut_short() -> dict[int, str]:
        faults = {number: fault(episode) for number, episode in episodes.items()}
        return {number: words for number, words in faults.items() if words}

    episodes = run(range(count))
    if cut := cut_short():
        logger.warning(message, len(cut), count, min(cut.values()))
        episodes |= run(cut)
        cut = cut_short()
        how = f"in a second attempt too, and env.aborted_share is {share}: {min(cut.values(), default='')}"
        require_few(len(cut), count, share, how)
    return episodes


def prove_order(sampler: Sampler, chat: Chat, attempts: Sequence[Attempt], shared: Shared) -> Metrics:
    """The metrics of `compare` on the episodes' first contexts; none in rounds, whose company is always the same."""
    if shared.limits.order == "rounds":
        return {}
    envs = [shared.run(opened(attempt.env(0))) for attempt in attempts]
    contexts = [Dialogue.of(chat, env).opening.ids for env in envs]
    return shared.run(compare(sampler, contexts, shared.limits))


async def compare(sampler: Sampler, contexts: Sequence[Sequence[int]], limits: EnvParams) -> Metrics:
    """Measures how much actions depend on the requests that are sampled at the same time.

    The same 16 requests are sampled together, one by one, and in another order among 48 others; their contexts [T] are
    taken in turn. Raises ValueError if the actions differ in any bit and the order is `exact_arrival`.
    """
    act = flowing(sampler, limits.order).act
    crowd = [_request(index, contexts[index % len(contexts)], limits) for index in range(_CROWD)]
    together = await asyncio.gather(*map(act, crowd[:_COMPARED]))
    actions = [await act(request) for request in crowd[:_COMPARED]]  # alone
    order = np.random.default_rng(derive("order")).permutation(_CROWD).tolist()
    shuffled = dict(zip(order, await asyncio.gather(*(act(crowd[index]) for index in order)), strict=True))
    actions += [shuffled[index] for index in range(_COMPARED)]
    gaps, tokens = zip(*map(apart, together * 2, actions), strict=True)
    metrics = {"order/logprob_gap": float(np.max(gaps)), "order/changed_tokens": float(sum(tokens))}
    _judge(limits.order, *metrics.values())
    return metrics


def apart(first: Action, second: Action) -> tuple[float, int]:
    """The largest gap in nats while the ids agree, and the number of tokens from the first different id on."""
    pairs = enumerate(zip(first.token_ids, second.token_ids, strict=False))
    shorter, longer = sorted((len(first.token_ids), len(second.token_ids)))
    alike = next((at for at, (a, b) in pairs if a != b), shorter)
    return float(np.abs(first.logprobs[:alike] - second.logprobs[:alike]).max(initial=0.0)), longer - alike


def _request(index: int, context: Sequence[int], limits: EnvParams) -> Request:
    prompt = list(context[: limits.max_tokens - 1])
    room = min(limits.max_action_tokens, limits.max_tokens - len(prompt))
    return Request(episode=index, step=0, context=prompt, seed=derive("order", index), max_tokens=room)


def _judge(order: Order, gap: float, tokens: float) -> None:
    if gap == tokens == 0:
        logger.info("an action has the same bits together, alone and in a crowd: arrivals change nothing")
        return
    finding = f"actions depend on their company, by up to {gap:.2g} nats and in {tokens:.0f} tokens"
    if order == "exact_arrival":
        raise ValueError(
            f"{finding}, and env.order is exact_arrival; set it to rounds, which is exact, or to arrival, which goes "
            "on, or give vLLM one thread on a CPU (engine.vllm.threads: 1)"
        )
    logger.warning("%s: this training is reproducible but for that; env.order: rounds is exact", finding)


class ScriptedSampler:
    """Plays given action texts with logprobs of 0; a text too long for its request is cut like a policy's."""

    def __init__(self, scripts: Sequence[Iterable[str]], chat: Chat) -> None:
        """`scripts[episode]` are the texts of its actions, without the end token, each read when its turn comes.

        An episode that is made again begins its script again. A summary that is asked for in between is the thought of
        the next action.
        """
        self._scripts = scripts
        self._chat = chat
        self._playing = dict[int, Iterator[str]]()

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """The next action of each request's script; a script must last as long as its episode."""
        actions = []
        for request in requests:
            if request.step == 0:
                self._playing[request.episode] = iter(self._scripts[request.episode])
            playing = self._playing[request.episode]
            text = next(playing, None)
            if text is None:
                raise ValueError(f"the script of episode {request.episode} ends before the episode does")
            if request.summary:
                self._playing[request.episode] = chain([text], playing)
                text = parse_action(text).thought
            text = self._chat.escape_action(text)
            ids = self._chat.encode_action(text, request.context)[: request.max_tokens]
            actions.append(Action.of(ids, [0.0] * len(ids), self._chat.end_ids))
        return actions

    async def act(self, request: Request) -> Action:
        """The next action of the script of the request's episode."""
        [action] = self.sample([request])
        return action
