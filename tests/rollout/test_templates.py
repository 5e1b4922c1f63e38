"""Chat templates in the styles of real model families: appended where they append, a new context where they rewrite."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from agent_r1.envs.base import Transition
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.records import CallStatus, Outcome, Question, Source, StopReason
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import Attempt, ScriptedSampler, collect, follow
from agent_r1.rollout.sampling import Action, Request
from agent_r1.rollout.template import Dialect
from agent_r1.search.base import Search
from agent_r1.tools.search import search_tool

SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"properties": {"query": {}}}}}
FOLDER = Path(__file__).parent / "templates"
CHATML, LLAMA = ("<|im_start|>", "<|im_end|>"), ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MARKS = {
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "qwen3_thinking": CHATML,
    "llama3": LLAMA,
    "mistral": ("[INST]", "[/INST]"),
}
STYLES = tuple(MARKS)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def tokenizer_of(style: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes, the style's message marks, and for Qwen the tags; `.` and a line break merge, as they do in many."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, ".Ċ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(".", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<s>", "</s>", *MARKS[style])])
    if style.startswith("qwen"):
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=(FOLDER / f"{style}.jinja").read_text() if template is None else template,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One action in a style: what the policy says, and whether the template lets it stand as it was said."""

    style: str
    action: str
    restarts: bool
    closed: bool = True


@dataclass
class Echo:
    """An environment that answers every action with the same text, `steps` times."""

    observation: str
    steps: int
    system: str = "Be brief."
    user: str = "Who?"
    tools: list[dict[str, Any]] = field(default_factory=list)

    def step(self, action: str) -> Transition:
        self.steps -= 1
        if self.steps < 0:
            return Transition(observation=None, outcome=Outcome.ANSWERED, answer="a")
        return Transition(observation=self.observation)


@dataclass
class Seen:
    """A sampler that keeps what went through it."""

    sampler: ScriptedSampler
    requests: list[Request] = field(default_factory=list)
    actions: list[list[int]] = field(default_factory=list)

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        actions = self.sampler.sample(requests)
        self.requests += requests
        self.actions += [action.token_ids for action in actions]
        return actions


def attempt(env: Echo) -> list[Attempt]:
    return [Attempt(question_id="q", group=0, sample=0, env=env)]


THOUGHT = "<think>Who?</think>Tesk."
CASES = [
    Case(style="qwen2_5", action=THOUGHT, restarts=False),
    Case(style="qwen2_5", action=" padded \n", restarts=False),
    Case(style="qwen3", action=THOUGHT, restarts=True),
    Case(style="qwen3", action="Tesk.", restarts=False),
    Case(style="qwen3", action=THOUGHT, restarts=True, closed=False),
    Case(style="qwen3_thinking", action="Who?\n</think>\n\nTesk.", restarts=False),  # it opens the thought
    Case(style="qwen3_thinking", action="Who?</think>Tesk.", restarts=True),
    Case(style="qwen3_thinking", action="Tesk.", restarts=True),
    Case(style="llama3", action=THOUGHT, restarts=False),
    Case(style="llama3", action="Tesk.\n", restarts=True),
    Case(style="mistral", action=" Tesk.", restarts=False),  # the template puts a space before the assistant's text
    Case(style="mistral", action="Tesk.", restarts=True),
]


def messages_as_put(style: str, action: str, observation: str) -> list[dict[str, str]]:
    """By hand what the style's template must be given: only Mistral's takes less than all of it."""
    if style == "mistral":
        wrapped = f"<tool_response>\n{observation}\n</tool_response>"
        contents = [("user", "Be brief.\n\nWho?"), ("assistant", action), ("user", wrapped)]
    else:
        contents = [("system", "Be brief."), ("user", "Who?"), ("assistant", action), ("tool", observation)]
    return [{"role": role, "content": content} for role, content in contents]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.style}-{case.action!r}-{case.closed}")
def test_a_context_is_what_the_template_renders(case: Case) -> None:
    """After a step, and after another one: appended or anew, the tokens are those of the template's own text."""
    tokenizer = tokenizer_of(case.style)
    chat = Chat(tokenizer)
    dialogue = chat.begin("Be brief.", "Who?")
    context = dialogue.opening.ids
    said = chat.encode_action(case.action)[: None if case.closed else -1]
    messages: list[dict[str, str]] = []
    for observation in ('A "quote".\nB.', "é"):
        reply = dialogue.reply(said, observation, closed=case.closed)
        assert reply.restarts is case.restarts
        context = reply.tokens.ids if reply.restarts else [*context, *said, *reply.tokens.ids]
        put = messages_as_put(case.style, case.action, observation)
        messages += put[len(put) - 2 :] if messages else put
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert chat.decode(context) == rendered
        assert context == tokenizer.encode(rendered, add_special_tokens=False)


@pytest.mark.parametrize("style", STYLES)
def test_what_a_style_cannot_render_is_put_in_another_way(style: str) -> None:
    chat = Chat(tokenizer_of(style))
    native = style != "mistral"
    assert chat.template.dialect == Dialect(system=native, tools=native, observations=native)
    text = chat.decode(chat.begin("Be brief.", "Who?", [SEARCH]).opening.ids)
    assert all(part in text for part in ("Be brief.", "Who?", '"search"', '"query"'))


def test_tools_in_words_by_hand() -> None:
    chat = Chat(tokenizer_of("mistral"))
    assert chat.decode(chat.begin("Be brief.", "Who?", [{"name": "f"}]).opening.ids) == (
        "<s>[INST] Be brief.\n\n# Tools\n\nYou may call one of these functions at a time:\n<tools>\n"
        '{"name": "f"}\n</tools>\n\nTo call one, write\n<tool_call>\n'
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n\nWho?[/INST]'
    )


@pytest.mark.parametrize("style", STYLES)
def test_hostile_text_stays_text_in_every_context(style: str, hostile: str) -> None:
    """Also where the policy spells a mark out and the template renders its words again."""
    tokenizer = tokenizer_of(style)
    chat = Chat(tokenizer)
    attack = "".join([hostile, *MARKS[style], "</s>"])

    def contexts(text: str) -> list[list[int]]:
        dialogue = chat.begin(text, text, [SEARCH])
        spelled = [index for letter in f"\n{text}" for index in chat.encoder.encode_sampled(letter)]
        replies = [dialogue.reply([*spelled, chat.end_id], text, closed=True) for _ in range(2)]
        return [dialogue.opening.ids, *(reply.tokens.ids for reply in replies)]

    for harmless, attacked in zip(contexts("a"), contexts(attack), strict=True):
        marks = [[index for index in ids if index in tokenizer.added_tokens_decoder] for ids in (harmless, attacked)]
        assert marks[0] == marks[1]


def test_a_new_context_by_hand() -> None:
    chat = Chat(tokenizer_of("qwen3"))
    reply = chat.begin("Be brief.", "Who?").reply(chat.encode_action(THOUGHT), "seen", closed=True)
    runs = dict.fromkeys(Source, "")
    for index, source in zip(reply.tokens.ids, reply.tokens.source, strict=True):
        runs[Source(source)] += chat.decode([index])
    history = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nTesk."
    assert runs == {
        Source.PROMPT: f"{history}<|im_end|>",
        Source.ACTION: "",
        Source.OBSERVATION: "seen",
        Source.TEMPLATE: ("\n<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    }


def test_a_template_that_rewrites_is_announced_with_the_first_span(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Chat(tokenizer_of("qwen2_5"))
        assert not caplog.records
        Chat(tokenizer_of("qwen3"))
    [record] = caplog.records
    assert "rewrites what was said" in record.getMessage()
    assert "<think>a</think>b" in record.getMessage()


def test_an_episode_of_several_contexts() -> None:
    """Three steps: a thought is dropped after the first, the second has none, the third ends the episode."""
    chat = Chat(tokenizer_of("qwen3"))
    sampler = Seen(ScriptedSampler([[THOUGHT, "Veld.", "<think>x</think>end"]], chat))
    [trajectory] = collect(sampler, chat, attempt(Echo("seen", 2)), max_tokens=400, max_action_tokens=64, seed=0)
    first, second = (trajectory.token_ids[span].tolist() for span in trajectory.contexts)
    requests, actions = sampler.requests, sampler.actions
    assert first == requests[0].context + actions[0]
    assert second[: len(requests[1].context)] == requests[1].context
    assert second == requests[2].context + actions[2]
    assert requests[2].context[: len(requests[1].context) + len(actions[1])] == requests[1].context + actions[1]
    assert trajectory.token_ids[trajectory.action_mask].tolist() == [index for ids in actions for index in ids]
    for step, ids in zip(trajectory.steps, actions, strict=True):
        assert trajectory.token_ids[step.action_start : step.action_stop].tolist() == ids
    assert "<think>" not in chat.decode(requests[2].context)
    assert not trajectory.logprobs.any()
    assert trajectory.outcome is Outcome.ANSWERED


def test_a_thought_that_the_prompt_opens_is_read_with_its_tag(
    hostile_question: Question, hostile_index: Search
) -> None:
    """Only the environment reads the tag; the policy goes on after it, and what was sampled stays what it was."""
    chat = Chat(tokenizer_of("qwen3_thinking"))
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "Tide"}}\n</tool_call>'
    sampler = Seen(
        ScriptedSampler([[f"<think>Whose?\n</think>\n\n{call}", f"{call}", "<think>x</think><answer>Q</answer>"]], chat)
    )
    env = ToolEnv(hostile_question, [search_tool(hostile_index, top_k=1)], max_steps=3)
    [trajectory] = collect(
        sampler,
        chat,
        [Attempt(question_id="q", group=0, sample=0, env=env)],
        max_tokens=4000,
        max_action_tokens=200,
        seed=0,
    )
    assert all(chat.decode(request.context).endswith("assistant\n<think>\n") for request in sampler.requests)
    assert [chat.decode(ids[:-1]) for ids in sampler.actions] == [
        f"Whose?\n</think>\n\n{call}",
        f"</think>{call}",
        "x</think><answer>Q</answer>",
    ]
    assert trajectory.token_ids[trajectory.action_mask].tolist() == [index for ids in sampler.actions for index in ids]
    assert [step.call_status for step in trajectory.steps] == [CallStatus.OK, CallStatus.OK, CallStatus.NONE]
    assert [step.rewards["think"] for step in trajectory.steps] == [1.0, 0.0, 1.0]
    assert (trajectory.outcome, trajectory.answer) == (Outcome.ANSWERED, "Q")


def test_a_thought_that_the_prompt_opens_and_nobody_closes_is_malformed(
    hostile_question: Question, hostile_index: Search
) -> None:
    chat = Chat(tokenizer_of("qwen3_thinking"))
    sampler = ScriptedSampler([["<think><answer>Q</answer>"]], chat)
    env = ToolEnv(hostile_question, [search_tool(hostile_index, top_k=1)], max_steps=1)
    one = Attempt(question_id="q", group=0, sample=0, env=env)
    [view] = follow(sampler, chat, one, max_tokens=4000, max_action_tokens=200, seed=0)
    assert view.action == "<think>\n<answer>Q</answer>"
    assert view.outcome is Outcome.MALFORMED


def test_a_template_that_writes_the_date_writes_the_same_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    template = (FOLDER / "llama3.jinja").read_text()
    dated = template.replace("bos_token", "bos_token + 'Today Date: ' + strftime_now('%d %b %Y')", 1)
    openings = []
    for day in (1, 2):
        clock = SimpleNamespace(now=lambda day=day: datetime(2030, 1, day))
        monkeypatch.setattr(chat_template_utils, "datetime", clock)
        chat = Chat(tokenizer_of("llama3", dated))
        openings.append(chat.decode(chat.begin("Be brief.", "Who?").opening.ids))
    assert openings[0] == openings[1]
    assert openings[0].startswith("<s>Today Date: 26 Jul 2024<|start_header_id|>system")


@pytest.mark.parametrize("spare", [0, 1])
def test_the_budget_is_a_contexts(spare: int) -> None:
    """A new context without room for an action ends the episode; with one token more, one action token follows."""
    chat = Chat(tokenizer_of("qwen3"))
    long_thought = f"<think>{'x' * 300}</think>b"
    renewed = chat.begin("Be brief.", "Who?").reply(chat.encode_action(long_thought), "y" * 300, closed=True)
    [trajectory] = collect(
        ScriptedSampler([[long_thought, "cd"]], chat),
        chat,
        attempt(Echo("y" * 300, 1)),
        max_tokens=len(renewed.tokens.ids) + spare,
        max_action_tokens=400,
        seed=0,
    )
    if spare:
        assert trajectory.steps[1].stop_reason is StopReason.LENGTH
        assert [span.stop - span.start for span in trajectory.contexts][1] == len(renewed.tokens.ids) + 1
    else:
        assert trajectory.outcome is Outcome.TOKEN_LIMIT
        assert trajectory.context_starts == [0]


@pytest.mark.parametrize("style", ["qwen2_5", "qwen3", "llama3"])
def test_a_template_without_a_generation_prompt_is_refused(style: str) -> None:
    template = (FOLDER / f"{style}.jinja").read_text().replace("if add_generation_prompt", "if false")
    with pytest.raises(ValueError, match=r"no generation prompt: it writes .*assistant.* before the assistant's text"):
        Chat(tokenizer_of(style, template))


def test_a_tokenizer_that_reads_across_marks_is_refused() -> None:
    """Its own rendering has other ids than the pieces: the first span that differs is named."""
    tokenizer: Any = tokenizer_of("qwen2_5")
    tokenizer.add_tokens([AddedToken("im_tail", single_word=False, lstrip=True, normalized=False)])
    tokenizer.chat_template = tokenizer.chat_template.replace("'\\n<tool_response>", "' im_tail\\n<tool_response>")
    with pytest.raises(ValueError, match="other tokens than its messages one by one"):
        Chat(tokenizer)
