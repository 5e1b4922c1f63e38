"""Episodes whose environments make them wait, and the parts of them that must not depend on who met whom."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agent_r1.envs.base import Attempt, Env, Transition
from agent_r1.envs.shared import Shared
from agent_r1.params import SHIPPED, load
from agent_r1.params.env import Order
from agent_r1.records import Outcome, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import collect
from agent_r1.rollout.sampling import Sampler

LIMITS = load(SHIPPED).env.model_copy(update={"aborted_share": 0.0, "order": "arrival", "max_action_tokens": 12})
PATIENCE_S = 20.0  # longer than anything here takes that does not hang
CONTEXTS = [[*range(index, index + 30)] for index in range(20)]


class Waiting(Env):
    """Answers `steps` actions, each once `wait` is over, and ends with the next."""

    system: str = "Be brief."
    user: str = "Who?"

    def __init__(self, wait: Callable[[], Any], steps: int = 1) -> None:
        self._wait, self._left = wait, steps

    async def step(self, action: str) -> Transition:
        self._left -= 1
        if self._left < 0:
            return Transition(outcome=Outcome.ANSWERED, answer=action)
        async with asyncio.timeout(PATIENCE_S):
            await self._wait()
        return Transition(observations=(f"seen, {self._left} to go",))


def run(
    chat: Chat, sampler: Sampler, waits: Sequence[Callable[[], Any]], *, steps: int = 1, order: Order = "arrival"
) -> list[Trajectory]:
    attempts = [
        Attempt(
            question_id=f"q{number}", group=number, sample=0, env=partial(lambda wait, _: Waiting(wait, steps), wait)
        )
        for number, wait in enumerate(waits)
    ]
    with Shared(LIMITS.model_copy(update={"order": order})) as shared:
        return collect(sampler, chat, attempts, shared, seed=7)


async def at_once() -> None:
    """Nothing to wait for."""


def without_latency(found: Sequence[Trajectory]) -> list[Any]:
    return [
        (
            each.token_ids.tobytes(),
            each.source.tobytes(),
            each.logprobs.tobytes(),
            each.seed,
            each.outcome,
            each.answer,
            [replace(step, calls=[replace(call, latency_s=0.0) for call in step.calls]) for step in each.steps],
        )
        for each in found
    ]


class InTurn:
    """Lets those who wait go on one by one, in a seeded order: as soon as so many wait, or all who are left."""

    def __init__(self, seed: int) -> None:
        self._random, self._waiting = random.Random(seed), list[asyncio.Future[None]]()

    async def wait(self) -> None:
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        asyncio.get_running_loop().call_later(self._random.random() * 0.05, self._let_one_go)
        await mine

    def _let_one_go(self) -> None:
        self._waiting.pop(self._random.randrange(len(self._waiting))).set_result(None)
