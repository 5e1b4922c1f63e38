"""The calls that chat templates teach, read by the project and by vLLM: `python -m benchmarks.peers.calls FOLDER`.

FOLDER holds chat templates, such as TRL's (as trl_NAME.jinja) and llama.cpp's (lcp_NAME.jinja). The first table counts
how the project renders them. Then calls are written in the forms that vLLM has a parser for, well formed and slightly
wrong, and read by both. Right is who finds the calls that were written, or none of a broken one. Differences follow.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from agent_r1.envs.base import ParsedCall, hermes, object_of, parse_action
from agent_r1.evaluation.comparison import markdown_table
from agent_r1.learn.builtin import train_tokenizer
from agent_r1.rollout.chat import Chat

PARSERS = {  # by a template of its calls
    "lcp_Qwen-Qwen2.5-7B-Instruct": "hermes",
    "lcp_Qwen3-Coder": "qwen3_coder",
    "lcp_StepFun3.5-Flash": "step3p5",
    "lcp_GLM-4.6": "glm45",
    "lcp_GLM-4.7-Flash": "glm47",
    "lcp_ByteDance-Seed-OSS": "seed_oss",
    "lcp_MiniMax-M2": "minimax_m2",
    "lcp_deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "lcp_deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "lcp_moonshotai-Kimi-K2": "kimi_k2",
    "lcp_meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "lcp_mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "lcp_unsloth-mistral-Devstral-Small-2507": "mistral",
    "lcp_ibm-granite-granite-4.0": "granite4",
    "lcp_GigaChat3.1-10B-A1.8B": "gigachat3",
    "lcp_poolside-Laguna-S-2.1": "poolside_v1",
}
MARK = re.compile(r"</?[|\uff5c]?[\w:\uff5c\u2581-]{1,40}[|\uff5c]?>|\[/?[A-Z_]{3,20}\]|\[e~\[|\]~!?b\]?\[?")
TYPES = {"word": "string", "count": "integer", "sure": "boolean", "many": "array", "deep": "object"}
SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look_up", "list_all")]
ONE, BARE = ParsedCall("look_up", {"word": "Tesk"}), ParsedCall("list_all", {})
VALUES = {"count": -3, "sure": True, "many": [1, "a", None], "deep": {"a": {"b": "c"}}}
WORDS = {  # texts in a call, by their case
    "a text that is JSON": "3",
    "lines and quotes": "He said \"no\",\nand left;  'so' {it} is \\ \u03a9",
    "blanks at the ends": " a  ",
    "an empty text": "",
    "tags in a text": "<b>x</b> <answer>y</answer>",
}
WHOLE = {
    "one call": [ONE],
    "two calls": [ONE, ParsedCall("look_up", {"word": "Kr\u00e5", "count": 3})],
    "no arguments": [BARE],
    "none, then one": [BARE, ONE],
    "one, then none": [ONE, BARE],
    "values of all types": [ParsedCall("look_up", VALUES)],
    "an unknown tool": [ParsedCall("look-down.v2", {"word": "a"})],
    "an unknown argument": [ParsedCall("look_up", {"where": "a"})],
    **{case: [ParsedCall("look_up", {"word": text})] for case, text in WORDS.items()},
}
AROUND: dict[str, Callable[[str], str]] = {  # changes after which a call is still one
    "a sentence before": lambda text: f"I look it up.\n{text}",
    "a sentence after": lambda text: f"{text}\nThat is it.",
}
BROKEN: dict[str, Callable[[str], str]] = {  # changes after which it is none
    "ends in an argument": lambda text: text[: text.index("Tesk") + 2],
    "ends after the argument": lambda text: text[: text.index("Tesk") + 4],
    "lacks the last mark": lambda text: text.strip()[: -len(re.findall(r"<[^<]*>|\W", text.strip())[-1])],
    "lacks its beginning": lambda text: text[text.index("look_up") :],
    "single quotes": lambda text: text.replace('"', "'"),
    "a comma too many": lambda text: text.replace('"Tesk"', '"Tesk",'),
}


def chat_of(template: str) -> Chat:
    """The project's renderer, with a byte-level tokenizer that has the template's marks as added tokens."""
    bare = json.loads(train_tokenizer(["a"], 300).backend_tokenizer.to_str()) | {"added_tokens": []}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(bare)))
    tokenizer.chat_template, marks = template, set(MARK.findall(template))
    user, system, action = ({"role": role, "content": role} for role in ("user", "system", "assistant"))
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": {"word": "a"}}}
    answer = {"role": "tool", "content": "tool", "tool_call_id": "abcdefghi", "name": "look_up"}
    for said in ([user, action, user], [system, user, action, answer], [user, action | {"tool_calls": [call]}, answer]):
        with suppress(TemplateError, TypeError):  # the renderer says why
            marks |= set(MARK.findall(tokenizer.apply_chat_template(said, tokenize=False, tools=TOOLS)))
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    return Chat(tokenizer)


def texts(write: Callable[[Sequence[ParsedCall]], str]) -> Iterator[tuple[str, str, list[ParsedCall], bool]]:
    """Cases: a name, a text, the calls in it, and whether it is whole."""
    yield from ((name, write(calls), calls, True) for name, calls in WHOLE.items())
    one = write([ONE])
    yield from ((name, change(one), [ONE], True) for name, change in AROUND.items())
    yield from ((name, change(one), [ONE], False) for name, change in BROKEN.items() if change(one) != one)


def vllm_reads(parser: str, chat: Chat, text: str) -> list[ParsedCall]:
    """vLLM's reading of a text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "u"}], tools=TOOLS)
    reader = ToolParserManager.get_tool_parser(parser)(chat.tokenizer, request.tools)
    calls = [call.function for call in reader.extract_tool_calls(text, request).tool_calls]
    return [ParsedCall(call.name, object_of(call.arguments) or {}) for call in calls]


def main(folder: Path) -> None:
    logging.disable(logging.WARNING)
    kinds, rows, listed = Counter[str](), list[list[str]](), list[str]()
    for path in sorted(folder.glob("*.jinja")):
        try:
            chat = chat_of(path.read_text())
        except ValueError as refusal:
            kinds[f"refused: {str(refusal).split(':')[0]}"] += 1
            continue
        own = "in a form of its own" if chat.calls else "as Hermes"
        kinds[own if chat.template.dialect.tools else "told in words, as Hermes"] += 1
        if (parser := PARSERS.get(path.stem)) is None:
            continue
        counts = Counter[tuple[bool, bool] | None]()
        for case, text, meant, whole in texts(chat.calls.write if chat.calls else hermes):
            both = parse_action(chat.understood(text, TOOLS), 8).calls, vllm_reads(parser, chat, text)
            ours, theirs = ([*found] == meant or not (whole or found) for found in both)
            counts[None if [*both[0]] == both[1] else (ours, theirs)] += 1
            if [*both[0]] != both[1]:
                listed.append(f"{path.stem}, {case}: ours {ours}, vLLM's {theirs}\n  {text!r}\n  {both}")
        shown = counts.total(), counts[None], *(counts[each] for each in product((True, False), repeat=2))
        rows.append([path.stem.partition("_")[2], f"`{parser}`", *map(str, shown)])
    head = ["template", "vLLM's parser", "texts", "alike", "both right", "vLLM wrong", "ours wrong", "both wrong"]
    counted = markdown_table(["calls", "templates"], [[kind, str(count)] for kind, count in kinds.most_common()])
    print("\n".join([counted, markdown_table(head, rows), *listed]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
