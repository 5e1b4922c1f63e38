"""Episodes whose environments wait, fail to open, or answer several calls at once."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agent_r1.envs.base import Attempt
from agent_r1.envs.shared import Shared
from agent_r1.faults import WorldFault
from agent_r1.records import Outcome, Source, Trajectory
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.codec import SAMPLE_TOOL
from agent_r1.rollout.episodes import ScriptedSampler, collect, follow
from tests.rollout.turns import LIMITS, Recording, Waiting, play


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


def test_an_environment_whose_prompt_leaves_no_room_is_closed(chat: Chat) -> None:
    env = Waiting(user="word " * 600)
    [found] = in_rounds(chat, [env])
    assert found.outcome is Outcome.TOKEN_LIMIT
    assert (env.opened, env.closed) == (1, 1)


def test_a_world_that_cannot_be_opened_is_an_aborted_episode(chat: Chat) -> None:
    """Tried twice; it has no tokens and no steps, and the others are none the worse."""
    shut, fine = Waiting(refuses=WorldFault("no room")), Waiting()
    aborted, answered = in_rounds(chat, [shut, fine])
    assert (aborted.outcome, aborted.steps, len(aborted.token_ids)) == (Outcome.ABORTED, [], 0)
    assert (answered.outcome, shut.opened) == (Outcome.ANSWERED, 2)


def test_a_fault_that_an_environment_raises_aborts_its_episode(chat: Chat) -> None:
    async def down() -> None:
        raise WorldFault("the board is gone")

    [aborted] = in_rounds(chat, [Waiting(down)])
    assert (aborted.outcome, len(aborted.steps)) == (Outcome.ABORTED, 1)


def test_an_episode_has_chances_of_its_own_and_the_same_when_it_is_made_again(chat: Chat) -> None:
    shut, fine = Waiting(refuses=WorldFault("no room")), Waiting()
    in_rounds(chat, [shut, fine])
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


def test_a_template_without_room_for_several_observations_is_refused_before_anything_is_sampled(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    only_the_last = "{% if message.role != 'tool' or loop.last %}"
    template = str(tokenizer.chat_template)
    body = template.index("{%", template.index("for message in messages") + 1)
    end = template.rindex("{% endfor %}") if "{% endfor %}" in template else template.rindex("{%- endfor %}")
    tokenizer.chat_template = f"{template[:body]}{only_the_last}{template[body:end]}{{% endif %}}{template[end:]}"
    chat, env = Chat(tokenizer), Waiting()
    attempt = Attempt(question_id="q", group=0, sample=0, env=lambda _: env)
    with (
        Shared(LIMITS.model_copy(update={"parallel_calls": 2})) as shared,
        pytest.raises(
            ValueError, match=r"does not write 2 tool messages one after the other; set env\.parallel_calls: 1"
        ),
    ):
        collect(scripted(1, chat), chat, [attempt], shared, seed=0)
    assert env.opened == 0
