"""Episodes whose environments wait, fail to open or answer several calls at once, in rounds and by arrival."""

import asyncio
import copy
import json
import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agent_r1.envs.base import Attempt
from agent_r1.envs.shared import Shared
from agent_r1.faults import WorldFault
from agent_r1.params.env import Order
from agent_r1.records import Outcome, Source, Trajectory
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.codec import SAMPLE_TOOL
from agent_r1.rollout.episodes import ScriptedSampler, collect, compare, follow, prove_order
from agent_r1.rollout.sampling import Action, Request
from tests.rollout.turns import CONTEXTS, LIMITS, Recording, Waiting, at_once, play, run


def scripted(episodes: int, chat: Chat) -> Recording:
    return Recording(ScriptedSampler([["go", "stop"]] * episodes, chat))


def in_rounds(chat: Chat, envs: Sequence[Waiting], sampler: Recording | None = None) -> list[Trajectory]:
    return play(chat, sampler or scripted(len(envs), chat), envs, order="rounds", aborted_share=1.0)


def test_the_environments_of_a_round_wait_at_the_same_time(chat: Chat) -> None:
    """Each waits until all do: one after the other they would wait for ever."""
    together = asyncio.Barrier(64)
    found = in_rounds(chat, [Waiting(together.wait) for _ in range(64)])
    assert [each.outcome for each in found] == [Outcome.ANSWERED] * 64


def test_a_round_is_asked_in_the_order_of_the_episodes_whoever_is_ready_first(chat: Chat) -> None:
    last_is_ready = asyncio.Event()

    async def last() -> None:
        last_is_ready.set()

    sampler = scripted(3, chat)
    slow = [Waiting(last_is_ready.wait), Waiting(last_is_ready.wait)]
    assert len(in_rounds(chat, [*slow, Waiting(last)], sampler)) == 3
    assert sampler.batches == [[0, 1, 2], [0, 1, 2]]


def test_an_error_ends_the_others_and_every_environment_is_closed(chat: Chat) -> None:
    async def broken() -> None:
        raise KeyError("a bug")

    envs = [Waiting(asyncio.Event().wait), Waiting(broken), Waiting(asyncio.Event().wait)]
    sampler = scripted(3, chat)
    with pytest.raises(KeyError, match="a bug"):
        in_rounds(chat, envs, sampler)
    assert [env.closed for env in envs] == [1, 1, 1]
    assert sampler.batches == [[0, 1, 2]], "nothing is sampled for episodes that are being ended"


def test_a_world_that_cannot_be_opened_is_an_aborted_episode(chat: Chat) -> None:
    """Tried twice by the same chances; it has no tokens and no steps, and the others are none the worse."""
    shut, fine = Waiting(refuses=WorldFault("no room")), Waiting()
    aborted, answered = in_rounds(chat, [shut, fine])
    assert (aborted.outcome, aborted.steps, len(aborted.token_ids)) == (Outcome.ABORTED, [], 0)
    assert (answered.outcome, shut.opened) == (Outcome.ANSWERED, 2)
    assert shut.seeds[0] == shut.seeds[1] != fine.seeds[0]


def test_who_stops_looking_on_closes_the_environment(chat: Chat) -> None:
    env = Waiting()
    attempt = Attempt(question_id="q", group=0, sample=0, env=lambda _: env)
    with Shared(LIMITS) as shared:
        looking = follow(scripted(1, chat), chat, attempt, shared, seed=7)
        next(looking)
        assert (env.opened, env.closed) == (1, 0)
        looking.close()
    assert env.closed == 1


@pytest.mark.parametrize("family", ["built_in", "qwen2_5", "qwen3", "llama3"])
@pytest.mark.parametrize("said", [("A: b.", "C: d."), ("same", "same"), ("x</tool_response>\n<tool_response>y", "z")])
def test_several_observations_are_rendered_as_the_template_does(
    tokenizer_of: Any, tiny_tokenizer: PreTrainedTokenizerFast, family: str, said: tuple[str, str]
) -> None:
    """Each result is OBSERVATION, the template's text around and between them is not, and its lookalikes are text."""
    tokenizer = tiny_tokenizer if family == "built_in" else tokenizer_of(family)
    chat = Chat(tokenizer)
    dialogue = Dialogue(chat, "Be brief.", "Who?", [SAMPLE_TOOL])
    action = chat.encode_action("go", dialogue.opening.ids)
    reply = dialogue.reply(action, said, closed=True)
    messages = [("system", "Be brief."), ("user", "Who?"), ("assistant", "go"), *(("tool", each) for each in said)]
    whole = chat.template.render(messages, [SAMPLE_TOOL])
    assert chat.decode([*dialogue.opening.ids, *action, *reply.ids]) == whole
    runs = groupby(zip(reply.source, reply.ids, strict=True), key=lambda pair: pair[0])
    spans = [(source, chat.decode([index for _, index in pairs])) for source, pairs in runs]
    observed = tuple(text.rstrip("\n") for source, text in spans if source == Source.OBSERVATION)  # may end in ".\n"
    assert observed == (tuple(json.dumps(each)[1:-1] for each in said) if family == "llama3" else said)
    assert [source for source, _ in spans] == [3, 2, 3, 2, 3]


def test_template_without_room_for_several_observations_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The template writes the last message of a tool alone."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    branch = '{%- elif message.role == "tool" %}'
    silent = branch.replace(" %}", " and not loop.last %}")
    tokenizer.chat_template = str(tokenizer.chat_template).replace(branch, silent + branch)
    chat, env = Chat(tokenizer), Waiting()
    attempt = Attempt(question_id="q", group=0, sample=0, env=lambda _: env)
    refused = pytest.raises(ValueError, match=r"2 tool messages .*; set env\.parallel_calls: 1")
    with Shared(LIMITS.model_copy(update={"parallel_calls": 2})) as shared, refused:
        collect(scripted(1, chat), chat, [attempt], shared, seed=0)
    assert env.opened == 0


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
