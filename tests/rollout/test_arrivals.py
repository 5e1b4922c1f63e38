"""Requests that leave when their episodes have them, and how far actions depend on their company."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from agent_r1.envs.base import Attempt
from agent_r1.envs.shared import Shared
from agent_r1.params.env import Order
from agent_r1.records import Outcome
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, apart, compare, prove_order
from agent_r1.rollout.sampling import Action, Request
from tests.rollout.turns import CONTEXTS, LIMITS, Waiting, at_once, run


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


def drawn(request: Request, shift: float = 0.0) -> Action:
    """An action that depends on its request alone, or on a shift too."""
    return Action.of([request.seed % 7 + 1, 2], [-1.0 - shift, -2.0], end_ids=[0])


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
    one = Action.of([1, 2, 3, 0], [-1.0, -2.0, -3.0, -4.0], end_ids=[0])
    assert apart(one, one) == (0.0, 0)
    assert apart(one, Action.of([1, 2, 0], [-1.0, -2.5, -9.0], end_ids=[0])) == (0.5, 2)
    assert apart(one, Action.of([4, 2, 3, 0], [-9.0] * 4, end_ids=[0])) == (0.0, 4)


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
