"""Prompts that leave no room for an action: counted and left out, or refused, before a model is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agent_r1.envs.base import Attempt, Env
from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.params import SHIPPED, load
from agent_r1.records import Question
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.prompts import UNANSWERED, without_room

LIMITS = load(SHIPPED).env.model_copy(update={"max_tokens": 512})
STYLES = ("qwen2_5", "qwen3", "llama3", "mistral")

TokenizerOf = Callable[..., PreTrainedTokenizerFast]


class Asks(Env):
    system = "Be brief."

    def __init__(self, text: str, _: int) -> None:
        self.user = text


def asked(texts: Sequence[str]) -> list[Attempt]:
    return [
        Attempt(question_id=f"q{group}", group=group, sample=sample, env=partial(Asks, text))
        for group, text in enumerate(texts)
        for sample in range(2)
    ]


def found(texts: Sequence[str], chat: Chat, *then: str, **changes: Any) -> set[str]:
    with Shared(LIMITS.model_copy(update=changes)) as shared:
        return without_room(asked(texts), chat, shared, "training questions", *then)


@pytest.mark.parametrize("style", STYLES)
def test_a_prompt_is_as_long_as_an_episode_has_it(style: str, tokenizer_of: TokenizerOf, hostile: str) -> None:
    """Marks in a question stay text in both."""
    chat = Chat(tokenizer_of(style))
    prompts = [Dialogue(chat, "Be brief.", text) for text in ("Who?", "", " Who? \n", hostile, f"é ﬁ {hostile} \n")]
    assert [*chat.lengths(each.prompt for each in prompts)] == [len(each.opening.ids) for each in prompts]


def test_one_overlong_question_among_240_is_left_out_with_a_line(chat: Chat, caplog: pytest.LogCaptureFixture) -> None:
    assert found([*["Who?"] * 200, "word " * 900, *["Who?"] * 39], chat) == {"q200"}
    [line] = caplog.messages
    assert line.startswith("1 of 240 training questions leave no room for an action in env.max_tokens 512, such as 'q2")
    assert line.endswith("they are left out; raise env.max_tokens to ask them")


def test_one_overlong_question_among_24_is_refused_with_both_ways_out(chat: Chat) -> None:
    texts = [*["Who?"] * 23, "word " * 900]
    with pytest.raises(ValueError, match=r"1 of 24 .*'q23'; .*raise env\.max_tokens, or raise env\.too_long_share"):
        found(texts, chat)
    assert found(texts, chat, max_tokens=8192) == set()
    assert found(texts, chat, too_long_share=0.05) == {"q23"}
    with pytest.raises(ValueError, match=r"raise env\.max_tokens or shorten env\.examples, or raise env"):
        found(texts, chat, examples="examples.jsonl")


def test_the_line_counts_and_names_three(chat: Chat, caplog: pytest.LogCaptureFixture) -> None:
    texts = ["a" * 2000, "Who?", "b" * 2000, "c" * 2000, "d" * 2500]
    longest = len(Dialogue(chat, "Be brief.", texts[-1]).opening.ids)
    assert found(texts, chat, UNANSWERED, too_long_share=0.8) == {"q0", "q2", "q3", "q4"}
    assert "such as 'q0', 'q2', 'q3'; " in caplog.text
    assert f"the longest prompt has {longest} tokens; each counts as an answer of nothing (token_limit)" in caplog.text


def test_prompts_that_a_world_or_an_agent_outside_says_are_not_asked_for(chat: Chat) -> None:
    """Neither a class without a declaration nor an agent is looked for."""
    row = Question(question_id="w", dataset="d", split="train", text="x" * 9000, env="toolbox", setup="{}", strata={})
    played = Attempt(question_id="p", group=0, sample=0, env=partial(Asks, "x" * 9000), agent="mine")
    with Shared(LIMITS) as shared:
        attempts = [*attempts_at([row], shared), played]
        assert without_room(attempts, chat, shared, "training questions") == set()
        [told] = asked(["x" * 9000])[:1]
        with pytest.raises(ValueError, match="1 of 3 training questions"):
            without_room([*attempts, replace(told, sample=3)], chat, shared, "training questions")
