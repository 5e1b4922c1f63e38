"""When the requests of the episodes leave for the sampler, and whether their actions depend on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from agent_r1.params.env import EnvParams, Order
from agent_r1.rollout.sampling import Action, Flowing, Request, Sampler
from agent_r1.seeds import derive

log = logging.getLogger(__name__)

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
