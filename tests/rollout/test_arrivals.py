"""Requests that leave when their episodes have them, through a sampler by hand and a pipe by hand."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from agent_r1.envs.base import Attempt
from agent_r1.envs.shared import Shared
from agent_r1.params.env import Order
from agent_r1.records import Outcome
from agent_r1.rollout import vllm_engine
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, apart, compare, prove_order
from agent_r1.rollout.sampling import Action, EngineError, Request
from tests.rollout.turns import CONTEXTS, LIMITS, PATIENCE_S, Waiting, at_once, run


def test_an_episode_that_waits_holds_no_other_up(chat: Chat) -> None:
    """The first waits until the second is over, which in rounds would be never."""
    over = asyncio.Event()

    class Noting(ScriptedSampler):
        async def act(self, request: Request) -> Action:
            asked.append((request.episode, request.step))
            if (request.episode, request.step) == (1, 2):
                over.set()
            return await super().act(request)

    asked: list[tuple[int, int]] = []
    found = run(chat, Noting([["go", "go", "stop"]] * 2, chat), [over.wait, at_once], steps=2)
    assert [(each.outcome, len(each.steps)) for each in found] == [(Outcome.ANSWERED, 3)] * 2
    assert asked == [(0, 0), (1, 0), (1, 1), (1, 2), (0, 1), (0, 2)]


def test_a_sampler_that_knows_rounds_alone_is_refused_before_anything_is_sampled(chat: Chat) -> None:
    class Batches:
        def sample(self, requests: Sequence[Request]) -> list[Action]:
            raise AssertionError(f"{len(requests)} requests are sampled")

    remedy = r"Batches takes no request in .* env\.order is arrival; set env\.order: rounds, or engine\.kind: vllm"
    with pytest.raises(ValueError, match=remedy):
        run(chat, Batches(), [at_once])


class NearEnd(vllm_engine.VllmProcess):
    """The end of a pipe, without a process at the other."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._waiting, self._tickets = connection, {}, count()
        self._process: Any = SimpleNamespace(wait=lambda: -9)


class ByHand(vllm_engine.VllmEngine):
    """The end of the pipe that episodes see; the other is in the test's hands."""

    def __init__(self) -> None:
        near, self.theirs = Pipe()
        self.homes, self._processes = 1, [NearEnd(near)]

    @property
    def listens(self) -> bool:
        """Whether the running loop looks at the pipe; afterwards it does not."""
        return asyncio.get_running_loop().remove_reader(self._processes[0]._connection.fileno())


def request(episode: int = 0) -> Request:
    return Request(episode=episode, step=0, context=CONTEXTS[episode], seed=episode, max_tokens=12)


def action(*ids: int) -> Action:
    return Action.of(list(ids), [-0.5] * len(ids), end_id=0)


async def until_asked(engine: ByHand, tasks: int) -> list[Any]:
    """The messages that so many tasks send."""
    for _ in range(tasks):
        await asyncio.sleep(0)
    return [engine.theirs.recv() for _ in range(tasks)]


def test_actions_find_those_who_asked_for_them() -> None:
    """Actions may end in any order, and the pipe has a reader only while a request waits."""

    async def ask(engine: ByHand) -> list[Action]:
        tasks = [asyncio.create_task(engine.act(request(number))) for number in range(3)]
        messages = await until_asked(engine, 3)
        assert [(name, each.episode) for name, _, each in messages] == [("arrive", 0), ("arrive", 1), ("arrive", 2)]
        tickets = [ticket for _, ticket, _ in messages]
        engine.theirs.send(("arrived", [(tickets[2], action(2)), (tickets[0], action(0))]))
        await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), PATIENCE_S)
        assert not tasks[1].done()
        engine.theirs.send(("arrived", [(tickets[1], action(1))]))
        found = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        assert not engine.listens
        return found

    assert [each.token_ids for each in asyncio.run(ask(ByHand()))] == [[0], [1], [2]]


def die(theirs: Connection) -> None:
    theirs.close()


def fail(theirs: Connection) -> None:
    theirs.send(("failed", "Traceback: out of memory"))
    theirs.close()


def babble(theirs: Connection) -> None:
    theirs.send_bytes(b"no pickle")


@pytest.mark.parametrize(
    ("end", "kind", "said"),
    [
        (die, EngineError, "ended with code -9"),
        (fail, EngineError, "Traceback: out of memory"),
        (babble, pickle.UnpicklingError, "invalid load key"),
    ],
)
def test_all_who_wait_hear_of_the_engines_end(end: Callable[[Connection], None], kind: type, said: str) -> None:
    async def ask(engine: ByHand) -> list[Any]:
        tasks = [asyncio.create_task(engine.act(request())) for _ in range(3)]
        await until_asked(engine, 3)
        end(engine.theirs)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)

    for error in asyncio.run(ask(ByHand())):
        with pytest.raises(kind, match=said):
            raise error


def test_an_engine_that_is_dead_is_found_out_by_who_asks_it() -> None:
    engine = ByHand()
    engine.theirs.close()
    with pytest.raises(EngineError, match="ended with code -9"):
        asyncio.run(asyncio.wait_for(engine.act(request()), PATIENCE_S))


def test_who_is_cancelled_takes_the_request_out_and_what_still_arrives_of_it_is_nobodys() -> None:
    """Neither that of others who wait nor the answer to the next call."""

    async def ask(engine: ByHand) -> Action:
        given_up, waits = (asyncio.create_task(engine.act(request(number))) for number in range(2))
        (_, lost, _), (_, kept, _) = await until_asked(engine, 2)
        given_up.cancel()
        with suppress(asyncio.CancelledError):
            await given_up
        assert engine.theirs.poll(), "it is not taken out"
        assert engine.theirs.recv() == ("abort", lost)
        with pytest.raises(RuntimeError, match="1 requests are under way"):
            engine.sample([request()])
        engine.theirs.send(("arrived", [(lost, action(1)), (kept, action(2))]))
        return await asyncio.wait_for(waits, PATIENCE_S)

    engine = ByHand()
    assert asyncio.run(ask(engine)).token_ids == [2]
    engine.theirs.send(("arrived", [(0, action(1))]))
    engine.theirs.send(("done", [action(3)]))
    assert [each.token_ids for each in engine.sample([request()])] == [[3]]


def drawn(request: Request, shift: float = 0.0) -> Action:
    """An action that depends on its request alone, or on a shift too."""
    return Action.of([request.seed % 7 + 1, 2], [-1.0 - shift, -2.0], end_id=0)


class Alone:
    def sample(self, requests: Sequence[Request]) -> list[Action]:
        return [drawn(each) for each in requests]

    async def act(self, request: Request) -> Action:
        return drawn(request)


class Crowded(Alone):
    """Rounds otherwise where several ask at once."""

    def __init__(self) -> None:
        self._asking = 0

    async def act(self, request: Request) -> Action:
        self._asking += 1
        await asyncio.sleep(0)
        shift = 0.25 if self._asking > 16 else 0.0
        await asyncio.sleep(0)
        self._asking -= 1
        return drawn(request, shift)


def test_how_far_two_actions_are_apart() -> None:
    one = Action.of([1, 2, 3, 0], [-1.0, -2.0, -3.0, -4.0], end_id=0)
    assert apart(one, one) == (0.0, 0)
    assert apart(one, Action.of([1, 2, 0], [-1.0, -2.5, -9.0], end_id=0)) == (0.5, 2)
    assert apart(one, Action.of([4, 2, 3, 0], [-9.0] * 4, end_id=0)) == (0.0, 4)


@pytest.mark.parametrize("order", ["arrival", "exact_arrival"])
def test_an_exact_sampler_is_said_to_be_exact(order: Order, caplog: pytest.LogCaptureFixture) -> None:
    limits = LIMITS.model_copy(update={"order": order})
    with caplog.at_level(logging.INFO, logger="agent_r1.rollout.episodes"):
        found = asyncio.run(compare(Alone(), CONTEXTS, limits))
    assert found == {"order/logprob_gap": 0.0, "order/changed_tokens": 0.0}
    assert "the same bits together, alone and in a crowd" in caplog.text


def test_a_sampler_that_minds_its_company_is_told_of_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    found = asyncio.run(compare(Crowded(), CONTEXTS, LIMITS))
    assert found == {"order/logprob_gap": 0.25, "order/changed_tokens": 0.0}
    assert "by up to 0.25 nats and in 0 tokens" in caplog.text
    with pytest.raises(ValueError, match=r"0\.25 nats.* env\.order is exact_arrival; set it to rounds"):
        asyncio.run(compare(Crowded(), CONTEXTS, LIMITS.model_copy(update={"order": "exact_arrival"})))


@pytest.mark.parametrize(("order", "said"), [("rounds", 0), ("arrival", 2)])
def test_rounds_need_no_proof(order: Order, said: int, chat: Chat) -> None:
    attempts = [Attempt(question_id="q", group=0, sample=0, env=lambda _: Waiting(at_once))]
    with Shared(LIMITS.model_copy(update={"order": order})) as shared:
        assert len(prove_order(Alone(), chat, attempts, shared)) == said
