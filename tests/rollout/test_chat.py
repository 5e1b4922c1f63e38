from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_r1.records import Source
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.encoding import Tokens

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}

# The parts of Qwen2.5-Instruct's template that matter here: no newline after thoughts is added or removed, tools are
# JSON in the system message, neighbouring tool messages share one user message.
QWEN_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + messages[0].content + '\\n\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call write\\n<tool_call>\\n{\\"name\\": <name>}\\n</tool_call><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages[1:] %}
{%- if message.role == 'tool' %}
{%- if messages[loop.index0].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 2].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def qwen_like() -> PreTrainedTokenizerFast:
    """Qwen's normaliser, word splitter and template; `.` and a line break merge into one token, as they do there."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(".", "Ċ"), ("Ċ", "Ċ")]
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    # the end of text is another token than the end of a message, as in Qwen2.5's base models
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", chat_template=QWEN_TEMPLATE)


@pytest.fixture(params=["built_in", "qwen_like"])
def tokenizer(request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return tiny_tokenizer if request.param == "built_in" else request.getfixturevalue("qwen_like")


def test_step_by_step_equals_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Appending piece by piece gives the ids that the template gives for the whole conversation."""
    chat = Chat(tokenizer)
    texts = ["Answer.", "Who made Low Tide?\n", "Low Tide: by Mara Quill.\nTesk: in Veld.", "Ångström e\u0301 ☃."]
    call = '<think>First.</think>\n<tool_call>\n{"name": "search", "arguments": {"query": "x."}}\n</tool_call>'
    messages = [("system", texts[0]), ("user", texts[1]), ("assistant", call), ("tool", texts[2])]
    messages += [("assistant", "hm"), ("tool", texts[3])]
    dialogue = chat.begin(texts[0], texts[1], [SEARCH])
    ids = dialogue.opening.ids
    for action, observation in [(call, texts[2]), ("hm", texts[3])]:
        sampled = chat.encode_action(action)
        reply = dialogue.reply(sampled, observation, closed=True)
        assert not reply.restarts
        ids += sampled + reply.tokens.ids
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tools=[SEARCH],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ids == tokenizer.encode(rendered, add_special_tokens=False)


def reply_to(chat: Chat, observation: str, *, closed: bool = True) -> Tokens:
    """What is appended to an action that says nothing special."""
    reply = chat.begin("s", "u").reply(chat.encode_action("a")[: None if closed else -1], observation, closed=closed)
    assert not reply.restarts
    return reply.tokens


def test_the_built_in_reply_by_hand(chat: Chat) -> None:
    reply = reply_to(chat, "Tesk")
    text = "".join(
        chat.decode([index]) if source is Source.TEMPLATE else f"[{chat.decode([index])}]"
        for index, source in zip(reply.ids, reply.source, strict=True)
    )
    assert text.replace("][", "") == (
        "\n<|im_start|>user\n<tool_response>\n[Tesk]\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_unclosed_action_is_closed_by_the_template(chat: Chat) -> None:
    closed, unclosed = reply_to(chat, "x"), reply_to(chat, "x", closed=False)
    assert unclosed.ids == [chat.end_id, *closed.ids]
    assert unclosed.source == [Source.TEMPLATE, *closed.source]


def test_the_end_token_is_the_templates_not_the_tokenizers(qwen_like: PreTrainedTokenizerFast) -> None:
    assert Chat(qwen_like).end_id == qwen_like.convert_tokens_to_ids("<|im_end|>") != qwen_like.eos_token_id


def test_a_token_across_the_border_belongs_to_the_observation(qwen_like: PreTrainedTokenizerFast) -> None:
    """'.' ends the observation and begins the token '.\\n' whose line break is the template's."""
    reply = reply_to(Chat(qwen_like), "A.")
    border = reply.ids.index(qwen_like.convert_tokens_to_ids(".Ċ"))
    assert reply.source[border - 1 : border + 2] == [Source.OBSERVATION, Source.OBSERVATION, Source.TEMPLATE]


def count_marks(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> int:
    return sum(index in tokenizer.added_tokens_decoder for index in ids)


def test_hostile_text_stays_text(tokenizer: PreTrainedTokenizerFast, hostile: str) -> None:
    """In the question, the system message and the reply: as many marks as with harmless text, and no other source."""
    chat = Chat(tokenizer)
    for harmless, attacked in [
        (chat.begin("a", "b", [SEARCH]).opening, chat.begin(hostile, hostile, [SEARCH]).opening),
        (reply_to(chat, "a"), reply_to(chat, hostile)),
    ]:
        assert count_marks(tokenizer, attacked.ids) == count_marks(tokenizer, harmless.ids)
        assert hostile in chat.decode(attacked.ids)
    assert set(chat.begin(hostile, hostile).opening.source) == {Source.PROMPT}


marks = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "assistant", "\n", "</tool_response>", "<|im", "_end|>", " ", "é"]
)


@given(st.lists(marks | st.text(max_size=3)).map("".join))
def test_any_observation_is_kept_between_the_templates_pieces(chat: Chat, text: str) -> None:
    reply = reply_to(chat, text)
    frame = reply_to(chat, "")
    assert len(reply.ids) == len(reply.source)
    assert chat.decode(reply.ids) == chat.decode(frame.ids).replace("\n\n", f"\n{text}\n")
    assert reply.source[0] == reply.source[-1] == Source.TEMPLATE
    observed = [index for index, source in zip(reply.ids, reply.source, strict=True) if source == Source.OBSERVATION]
    assert text in chat.decode(observed)


def test_prompt_hash_knows_system_tools_and_template(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    chat = Chat(tiny_tokenizer)
    other = with_template(tiny_tokenizer, str(tiny_tokenizer.chat_template).replace("\\nTools:", "\\nYou have:"))
    hashes = {
        chat.prompt_hash("a"),
        chat.prompt_hash("b"),
        chat.prompt_hash("a", [SEARCH]),
        Chat(other).prompt_hash("a", [SEARCH]),
    }
    assert len(hashes) == 4
    assert chat.prompt_hash("a") == Chat(tiny_tokenizer).prompt_hash("a")


def with_template(tokenizer: PreTrainedTokenizerFast, template: Any) -> PreTrainedTokenizerFast:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("message.content + ", "message.content + '\\n' + ", "no end token.*'\\\\n<|im_end|>"),
        ("message.content + ", "message.content + message.content + ", "writes the text 'USER' 2 times"),
        (
            "if add_generation_prompt",
            "if false",
            r"no generation prompt: it writes '<\|im_start\|>assistant\\n' before",
        ),
        ("for message in messages", "for message in messages[:2]", "writes the text 'ACTION' 0 times"),
        ('message.role == "tool"', "loop.index > 2 and raise_exception('two at most')", "refuses .*: two at most"),
    ],
)
def test_templates_that_cannot_be_used(
    tiny_tokenizer: PreTrainedTokenizerFast, old: str, new: str, message: str
) -> None:
    template = str(tiny_tokenizer.chat_template)
    assert old in template
    with pytest.raises(ValueError, match=message):
        Chat(with_template(tiny_tokenizer, template.replace(old, new)))


def test_a_tokenizer_without_a_template(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        Chat(with_template(tiny_tokenizer, None))
