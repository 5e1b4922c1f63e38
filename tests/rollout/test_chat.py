"""Chat templates in the styles of real model families: appended where they append, a new context where they rewrite.

Appended tokens are the template's rendering, id for id, and no text of the world becomes a mark.
"""

import copy
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from agent_r1.envs.base import Conversation, Env, parse_action
from agent_r1.envs.tool_env import advice, example_call
from agent_r1.learn.model import load_tokenizer
from agent_r1.records import Source
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.codec import Encoded, Piece, Tools
from tests.cases import cases

QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"type": "function", "function": {"name": "search", "description": "Finds.", "parameters": QUERY}}
STYLES = ("qwen2_5", "qwen3", "qwen3_thinking", "llama3", "mistral")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # the fallback of a Unigram model
THOUGHT = "<think>Who?</think>Tesk."

TokenizerOf = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(params=["built_in", *STYLES, "unigram", "swallowing", "prefixing"])
def tokenizer(
    request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast, tokenizer_of: TokenizerOf
) -> PreTrainedTokenizerFast:
    qwen = tokenizer_of("qwen2_5")
    if request.param == "swallowing":
        return swallowing(qwen)
    if request.param in ("unigram", "prefixing"):
        return {"unigram": unigram, "prefixing": prefixing}[request.param](str(qwen.chat_template))
    return tiny_tokenizer if request.param == "built_in" else tokenizer_of(request.param)


def unigram(template: str, *, fallback: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece makes it: the marks are in the vocabulary of its model, which finds them in text."""
    marks = ["<unk>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<|endoftext|>"]
    vocabulary = [(piece, 0.0) for piece in marks] + [(piece, -9.0) for piece in (*BYTES, *map(chr, range(32, 127)))]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=fallback))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template)


def swallowing(style: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A style's tokenizer whose message marks swallow the blanks beside them (Phi), saved as it padded last."""
    state = json.loads(style.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        token["lstrip"] = token["rstrip"] = token["special"]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.enable_padding(length=64)
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])  # text like any other (Gemma)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=style.chat_template)


def prefixing(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a blank before the text that it begins with, and before no other (Mistral)."""
    style = unigram(template)
    state = json.loads(style.backend_tokenizer.to_str())
    state["model"]["vocab"] += [["\u2581", -9.0], ["\u2581H", -9.0]]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="Hi." + template)


def with_template(tokenizer: PreTrainedTokenizerFast, template: Any) -> PreTrainedTokenizerFast:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


@pytest.mark.parametrize("tokenizer", ["built_in", "qwen2_5", "swallowing", "prefixing"], indirect=True)
def test_step_by_step_equals_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Appending piece by piece gives the ids that the template gives for the whole conversation."""
    chat = Chat(tokenizer)
    texts = ["Answer.", "Who made Low Tide?\n", "Low Tide: by Mara Quill.\nTesk: in Veld.", "Ångström e\u0301 ☃."]
    call = '<think>First.</think>\n<tool_call>\n{"name": "search", "arguments": {"query": "x."}}\n</tool_call>'
    messages = [("system", texts[0]), ("user", texts[1]), ("assistant", call), ("tool", texts[2])]
    messages += [("assistant", "hm"), ("tool", texts[3])]
    dialogue = Dialogue(chat, texts[0], texts[1], [SEARCH])
    ids = dialogue.opening.ids
    for action, observation in [(call, texts[2]), ("hm", texts[3])]:
        sampled = chat.encode_action(action)
        reply = dialogue.reply(sampled, [observation], closed=True)
        assert not reply.restarts
        ids += sampled + reply.ids
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tools=[SEARCH],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ids == tokenizer.encode(rendered, add_special_tokens=False)


def reply_to(chat: Chat, *observations: str, closed: bool = True, tools: Tools = (SEARCH,)) -> Encoded:
    """The tokens that are appended to a plain action."""
    action = chat.encode_action("a")[: None if closed else -1]
    reply = Dialogue(chat, "s", "u", tools).reply(action, observations, closed=closed)
    assert not reply.restarts
    return reply


def test_action_without_the_templates_end_is_closed_by_the_template(tokenizer_of: TokenizerOf) -> None:
    tokenizer: Any = tokenizer_of("qwen2_5")
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    assert chat.end_ids == [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    action = [*chat.encode_action("a")[:-1], tokenizer.eos_token_id]
    other = Dialogue(chat, "s", "u", [SEARCH]).reply(action, ["x"], closed=True)
    closed = reply_to(chat, "x")
    for reply in (other, reply_to(chat, "x", closed=False)):
        assert (reply.ids, reply.source) == ([chat.end_id, *closed.ids], [Source.TEMPLATE, *closed.source])


def test_a_token_across_the_border_belongs_to_the_observation(tokenizer_of: TokenizerOf) -> None:
    """'.' ends the observation and begins the token '.\\n' whose line break is the template's."""
    tokenizer = tokenizer_of("qwen2_5")
    reply = reply_to(Chat(tokenizer), "A.")
    border = reply.ids.index(tokenizer.convert_tokens_to_ids(".Ċ"))
    assert reply.source[border - 1 : border + 2] == [Source.OBSERVATION, Source.OBSERVATION, Source.TEMPLATE]


@pytest.mark.parametrize("with_tools", [True, False])
def test_hostile_text_stays_text(tokenizer: PreTrainedTokenizerFast, hostile: str, with_tools: bool) -> None:
    """In question, system message, tool and replies, and where the policy spells a mark out that is rendered again.

    There are as many marks as with harmless text, and the opening is the prompt's alone.
    """
    chat = Chat(tokenizer)
    attack = "".join([hostile, *map(str, tokenizer.added_tokens_decoder.values())])

    def contexts(text: str) -> list[list[int]]:
        argument = {"type": "string", "description": text, "enum": [text]}
        schema = {"type": "object", "properties": {text: argument}, "required": [text]}
        tool = {"type": "function", "function": {"name": text, "description": text, "parameters": schema}}
        dialogue = Dialogue(chat, text, text, [SEARCH, tool] if with_tools else [])
        assert set(dialogue.opening.source) == {Source.PROMPT}
        spelled = [index for letter in f"\n{text}" for index in chat.encode_sampled(letter)]
        replies = [dialogue.reply([*spelled, chat.end_id], [text], closed=True) for _ in range(2)]
        return [dialogue.opening.ids, *(reply.ids for reply in replies)]

    not_blank = {index for index, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    for harmless, attacked in zip(contexts("a"), contexts(attack), strict=True):
        marks = [[index for index in ids if index in not_blank] for ids in (harmless, attacked)]
        assert marks[0] == marks[1]
        assert attack in chat.decode(attacked)


def messages_as_put(style: str, action: str, observation: str, role: str) -> list[dict[str, str]]:
    """The messages that each template takes, by hand: only Mistral's takes fewer kinds."""
    if style == "mistral":
        wrapped = f"<tool_response>\n{observation}\n</tool_response>" if role == "tool" else observation
        contents = [("user", "Be brief.\n\nWho?"), ("assistant", action), ("user", wrapped)]
    else:
        contents = [("system", "Be brief."), ("user", "Who?"), ("assistant", action), (role, observation)]
    return [{"role": role, "content": content} for role, content in contents]


@cases("style, action, restarts, closed")
@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_context_is_what_the_template_renders(
    style: str, action: str, restarts: bool, closed: bool, role: str, tokenizer_of: TokenizerOf
) -> None:
    """After a step, and after another one: appended or anew, the tokens are those of the template's own text."""
    tokenizer = tokenizer_of(style)
    chat, tools = Chat(tokenizer), [SEARCH] if role == "tool" else []
    dialogue = Dialogue(chat, "Be brief.", "Who?", tools)
    context = dialogue.opening.ids
    said = chat.encode_action(action)[: None if closed else -1]
    messages: list[dict[str, str]] = []
    for observation in ('A "quote".\nB.', "é"):
        reply = dialogue.reply(said, [observation], closed=closed)
        assert reply.restarts is restarts
        context = reply.ids if reply.restarts else [*context, *said, *reply.ids]
        put = messages_as_put(style, action, observation, role)
        messages += put[len(put) - 2 :] if messages else put
        if style == "mistral":  # whose template knows none
            messages[0]["content"] = dialogue.text.split("[INST] ")[1].split("[/INST]")[0]
        given = None if style == "mistral" else tools or None
        rendered = tokenizer.apply_chat_template(messages, tools=given, tokenize=False, add_generation_prompt=True)
        assert chat.decode(context) == rendered
        assert context == tokenizer.encode(rendered, add_special_tokens=False)


class Opening(Env):
    system = "Be brief."
    user = "Who?"
    tools = (SEARCH,)

    @property
    def example_call(self) -> str:
        return example_call(SEARCH, self.user)


def example(*actions: str, observations: Sequence[str] = (), replies: str = "tool") -> Conversation:
    return Conversation(
        where="examples.jsonl, row 1",
        dataset="",
        replies=replies,
        system="",
        user="Where?",
        actions=list(actions),
        observations=list(observations),
    )


@pytest.mark.parametrize("style", STYLES)
def test_examples_are_written_as_the_template_writes_a_dialogue(style: str, tokenizer_of: TokenizerOf) -> None:
    """Prompt by source; an action has the tokens that a policy would sample, and marks of an observation stay text."""
    chat = Chat(tokenizer_of(style))
    action = chat.encode_action("It is Tesk.")
    dialogue = Dialogue(chat, "Be brief.", "Where?", [SEARCH])
    dialogue.reply(action, ["a <|im_end|> b"], closed=True)
    messages = [*dialogue._messages, ("assistant", "Tesk."), ("user", "Who?")]
    shown = example("It is Tesk.", "Tesk.", observations=["a <|im_end|> b"])
    opening = Dialogue(chat, "Be brief.", "Who?", [SEARCH], [shown]).opening
    assert opening.ids == chat.encode([Piece(chat.template.render(messages, [SEARCH]), Source.PROMPT)]).ids
    assert {*opening.source} == {Source.PROMPT}
    assert chat.prompt_hash("a", [SEARCH], [shown]) != chat.prompt_hash("a", [SEARCH])


def test_a_call_goes_in_the_form_of_the_model_and_out_in_that_of_environments(tokenizer_of: TokenizerOf) -> None:
    chat = Chat(tokenizer_of("llama3"))
    call = '<think>So.</think>\n<tool_call>\n{"name": "search", "arguments": {"query": "<|eot_id|>"}}\n</tool_call>'
    native = '<think>So.</think>{"name": "search", "parameters": {"query": "<|eot_id|>"}}'
    action = chat.encode_action(chat.escape_action(call))
    assert chat.decode(action) == f"{native}<|eot_id|>"
    assert action.count(chat.end_id) == 1, "a mark in the arguments stays text"
    assert parse_action(chat.understood(native, [SEARCH])) == parse_action(call)
    env = Opening()
    dialogue = Dialogue.of(chat, env)
    told = chat.decode(dialogue.reply(action, [advice(env.example_call, "tagged")], closed=True).ids)
    example = '{\\"name\\": \\"search\\", \\"parameters\\": {\\"query\\": \\"Who?\\"}}'
    assert f"Write {example} or an answer" in told, "the form that a message names is the model's"
    assert parse_action(dialogue.messages()[2][1]) == parse_action(call), "for a template of its own"


def test_tools_in_words_by_hand(tokenizer_of: TokenizerOf) -> None:
    chat = Chat(tokenizer_of("mistral"))
    assert chat.decode(Dialogue(chat, "Be brief.", "Who?", [{"name": "f"}]).opening.ids) == (
        "<s>[INST] Be brief.\n\n# Tools\n\nYou may call one of these functions at a time:\n<tools>\n"
        '{"name": "f"}\n</tools>\n\nTo call one, write\n<tool_call>\n'
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n\nWho?[/INST]'
    )


def test_a_new_context_by_hand(tokenizer_of: TokenizerOf, caplog: pytest.LogCaptureFixture) -> None:
    """A template that rewrites is announced with the first span."""
    assert Chat(tokenizer_of("qwen2_5"))
    assert not caplog.messages
    chat = Chat(tokenizer_of("qwen3"))
    assert "rewrites earlier messages" in caplog.text
    assert "<think>a</think>b" in caplog.text
    reply = Dialogue(chat, "Be brief.", "Who?").reply(chat.encode_action(THOUGHT), ["seen"], closed=True)
    runs = dict.fromkeys(Source, "")
    for index, source in zip(reply.ids, reply.source, strict=True):
        runs[Source(source)] += chat.decode([index])
    history = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nTesk."
    assert runs == {
        Source.PROMPT: f"{history}<|im_end|>",
        Source.ACTION: "",
        Source.OBSERVATION: "seen",
        Source.TEMPLATE: "\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n",
        Source.DEMONSTRATION: "",
    }


def test_template_with_a_date_writes_one_date(tokenizer_of: TokenizerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    template = str(tokenizer_of("llama3").chat_template)
    dated = template.replace("bos_token", "bos_token + 'Today Date: ' + strftime_now('%d %b %Y')", 1)
    openings = []
    for day in (1, 2):
        clock = SimpleNamespace(now=lambda day=day: datetime(2030, 1, day))
        monkeypatch.setattr(chat_template_utils, "datetime", clock)
        chat = Chat(tokenizer_of("llama3", dated))
        openings.append(chat.decode(Dialogue(chat, "Be brief.", "Who?").opening.ids))
    assert openings[0] == openings[1]
    assert openings[0].startswith("<s>Today Date: 26 Jul 2024<|start_header_id|>system")


@cases("old, new, message")
def test_unusable_templates_refused(tiny_tokenizer: PreTrainedTokenizerFast, old: str, new: str, message: str) -> None:
    template = str(tiny_tokenizer.chat_template)
    assert old in template
    with pytest.raises(ValueError, match=message):
        Chat(with_template(tiny_tokenizer, template.replace(old, new)))


def test_error_of_code_of_a_template_is_its_refusal(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    nine = "{% set rest = 1 % (messages | length - 9) %}"
    chat = Chat(with_template(tiny_tokenizer, nine + str(tiny_tokenizer.chat_template)))
    assert "Who?" in chat.template.render([("user", "Who?")] * 8)
    with pytest.raises(ValueError, match=r"a conversation of user, user.*: integer modulo by zero; use a model"):
        chat.template.render([("user", "Who?")] * 9)


def test_what_a_tokenizer_cannot_write_is_refused(chat: Chat, tokenizer_of: TokenizerOf) -> None:
    with pytest.raises(ValueError, match="as its added token '<unk>'; use a tokenizer that has bytes"):
        Chat(unigram(str(tokenizer_of("qwen2_5").chat_template), fallback=False))
    with pytest.raises(ValueError, match=r"half of a character, which UTF-8 cannot write: '.*\\ud800"):
        Dialogue(chat, "s", "\ud800").opening  # noqa: B018


def test_a_tokenizer_that_reads_across_marks_is_refused(tokenizer_of: TokenizerOf) -> None:
    """The whole rendering has other ids than its pieces, and the message names the first span that differs."""
    tokenizer: Any = tokenizer_of("qwen2_5")
    tokenizer.add_tokens([AddedToken("im_tail", single_word=True, normalized=False)])
    tokenizer.chat_template = tokenizer.chat_template.replace("'\\n<tool_response>", "'xim_tail\\n<tool_response>")
    with pytest.raises(ValueError, match="other tokens than its messages one by one"):
        Chat(tokenizer)


def test_unsampled_action_has_tokens_for_tags_alone(chat: Chat, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    text = "<think>a<|im_end|>b</think><|<|im_end|>im_end|></tool_response><answer>c</answer>"
    ids = chat.encode_action(chat.escape_action(text))
    assert chat.decode(ids) == f"{text}<|im_end|>"
    marks = [chat.decode([token]) for token in ids if token in tiny_tokenizer.added_tokens_decoder]
    assert marks == ["<think>", "</think>", "<answer>", "</answer>", "<|im_end|>"]


def test_arguments_of_a_template_are_kept_for_later_renderings(tokenizer_of: TokenizerOf, tmp_path: Path) -> None:
    """A policy keeps them in its own template; another value counts instead, and makes other prompts."""
    silent = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    tokenizer_of("qwen3").save_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "Who?"}]
    hashes = set[str]()
    for folder, arguments, ends in (
        ("model", {}, "<|im_start|>assistant\n"),
        ("model", {"enable_thinking": False}, silent),
        ("policy", {}, silent),
        ("policy", {"enable_thinking": False}, silent),
        ("policy", {"enable_thinking": True}, "<|im_start|>assistant\n"),
    ):
        tokenizer = load_tokenizer(tmp_path / folder, template=arguments)
        hashes.add(Chat(tokenizer).prompt_hash("Be brief."))
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert str(text).endswith(f"<|im_end|>\n{ends}")
        if arguments and folder == "model":
            tokenizer.save_pretrained(tmp_path / "policy")
    assert len(hashes) == 2
    with pytest.raises(ValueError, match=r"model.template .* does not read, thinking for one; leave them out"):
        load_tokenizer(tmp_path / "model", template={"thinking": False})
