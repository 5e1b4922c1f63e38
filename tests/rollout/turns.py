"""Episodes whose environments make them wait, and the parts of them that must not depend on who met whom."""

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
from agent_r1.rollout.sampling import Action, Request, Sampler

LIMITS = load(SHIPPED).env.model_copy(update={"aborted_share": 0.0, "order": "arrival", "max_action_tokens": 12})
PATIENCE_S = 20.0  # longer than anything here takes that does not hang
CONTEXTS = [[*range(index, index + 30)] for index in range(20)]


class Recording:
    """A sampler that keeps its requests and actions, round by round."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.rounds: list[list[tuple[Request, Action]]] = []

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        actions = self._sampler.sample(requests)
        self.rounds.append(list(zip(requests, actions, strict=True)))
        return actions

    def of(self, episode: int) -> list[tuple[Request, Action]]:
        return [pair for pairs in self.rounds for pair in pairs if pair[0].episode == episode]

    @property
    def batches(self) -> list[list[int]]:
        return [[request.episode for request, _ in pairs] for pairs in self.rounds]


async def at_once() -> None:
    """Nothing to wait for."""


class Waiting(Env):
    """Answers `steps` actions, each once `wait` is over, and ends with the next. It may refuse to open."""

    def __init__(
        self, wait: Callable[[], Any] = at_once, steps: int = 1, refuses: Exception | None = None, user: str = "Who?"
    ) -> None:
        self.system, self.user = "Be brief.", user
        self._wait, self._steps, self._refuses = wait, steps, refuses
        self.opened = self.closed = 0
        self.seeds: list[int] = []

    async def open(self) -> None:
        self.opened, self._left = self.opened + 1, self._steps
        if self._refuses:
            raise self._refuses

    async def step(self, action: str) -> Transition:
        self._left -= 1
        if self._left < 0:
            return Transition(outcome=Outcome.ANSWERED, answer=action)
        async with asyncio.timeout(PATIENCE_S):
            await self._wait()
        return Transition(observations=(f"seen, {self._left} to go",))

    async def close(self) -> None:
        self.closed += 1


def _made(env: Waiting, seed: int) -> Env:
    env.seeds.append(seed)
    return env


def play(
    chat: Chat, sampler: Sampler, envs: Sequence[Waiting], *, order: Order = "arrival", aborted_share: float = 0.0
) -> list[Trajectory]:
    attempts = [
        Attempt(question_id=f"q{number}", group=number, sample=0, env=partial(_made, env))
        for number, env in enumerate(envs)
    ]
    with Shared(LIMITS.model_copy(update={"order": order, "aborted_share": aborted_share})) as shared:
        return collect(sampler, chat, attempts, shared, seed=7)


def run(
    chat: Chat, sampler: Sampler, waits: Sequence[Callable[[], Any]], *, steps: int = 1, order: Order = "arrival"
) -> list[Trajectory]:
    return play(chat, sampler, [Waiting(wait, steps) for wait in waits], order=order)


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
